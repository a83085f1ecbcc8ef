"""What a user's script does; the tests start it under torchrun, under mpirun and alone."""

import torch
import torch.distributed as dist

import allstep

allstep.init(device="cpu", timeout_s=90).close()  # what it leaves behind is in nobody's way
with allstep.init(device="cpu", timeout_s=90) as comm:
    total = comm.all_reduce(torch.tensor(comm.rank + 1))
    place = (comm.local_rank, comm.local_size, comm.node_rank, comm.num_nodes)
    alone = comm.split(comm.rank).size
    everyone = comm.all_gather_object(place)
    if comm.rank == 0:
        print(f"size={comm.size} total={total} places={everyone} alone={alone}")
        print(f"torch.distributed={dist.is_initialized()}")
