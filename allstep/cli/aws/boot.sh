# Runs once, at a node's first boot. What it leaves trains at each boot, and goes on after a failure.
# Given before: FILE_SYSTEM, NODES, PACKAGE, RUN, TRAIN, WORKERS_PER_NODE.
set -euo pipefail

export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -q -y curl nfs-common python3-venv
python3 -m venv /opt/allstep
/opt/allstep/bin/pip install -q "$PACKAGE"

cat >/opt/allstep/settings <<END
FILE_SYSTEM=$FILE_SYSTEM
NODES=$NODES
RUN=$RUN
TRAIN=($TRAIN)
WORKERS_PER_NODE=$WORKERS_PER_NODE
END

cat >/opt/allstep/train <<'END'
#!/bin/bash
set -euo pipefail
source /opt/allstep/settings

metadata() {
    local address=http://169.254.169.254/latest token
    token=$(curl -sSf --retry 5 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' $address/api/token)
    curl -sSf --retry 5 -H "X-aws-ec2-metadata-token: $token" "$address/meta-data/$1"
}

rank=$(metadata tags/instance/allstep-rank)
if [ "$rank" = 0 ]; then
    master=$(metadata local-ipv4)
else
    master=$(metadata tags/instance/allstep-master)
fi

mkdir -p /mnt/shared
mountpoint -q /mnt/shared || mount -t nfs4 \
    -o nfsvers=4.1,rsize=1048576,wsize=1048576,hard,timeo=600,retrans=2,noresvport \
    "$FILE_SYSTEM:/" /mnt/shared

# All nodes are alike, and so are sums that are rounded by threads. With GPUs torchrun says 1.
if [ "$WORKERS_PER_NODE" != gpu ]; then
    export OMP_NUM_THREADS=$(($(nproc) > WORKERS_PER_NODE ? $(nproc) / WORKERS_PER_NODE : 1))
fi
exec /opt/allstep/bin/torchrun --nnodes "$NODES" --node-rank "$rank" \
    --nproc-per-node "$WORKERS_PER_NODE" --master-addr "$master" --master-port 29500 \
    -m allstep train "${TRAIN[@]}" --run-dir "/mnt/shared/runs/$RUN" --resume auto
END
chmod +x /opt/allstep/train

cat >/etc/systemd/system/allstep.service <<'END'
[Unit]
Description=allstep train
Wants=network-online.target
After=network-online.target

[Service]
ExecStart=/opt/allstep/train
Restart=on-failure
RestartSec=10
LimitNOFILE=65536
LimitMEMLOCK=infinity
LimitSTACK=8388608
StandardOutput=journal+console

[Install]
WantedBy=multi-user.target
END
systemctl enable --now allstep
