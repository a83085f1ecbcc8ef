"""What a user's script does; the tests start it under torchrun, under mpirun and alone."""

import time

import torch
import torch.distributed as dist

import allstep


def init_once() -> None:
    with allstep.init(device="cpu", timeout_s=90) as comm:
        if comm.rank == 0:
            time.sleep(0.5)  # the others come to the next `init` before rank 0 has left this one


if __name__ == "__main__":
    init_once()  # what it leaves behind is in nobody's way
    with allstep.init(device="cpu", timeout_s=90) as comm:
        total = comm.all_reduce(torch.tensor(comm.rank + 1))
        place = (comm.local_rank, comm.local_size, comm.node_rank, comm.num_nodes)
        alone = comm.split(comm.rank).size
        everyone = comm.all_gather_object(place)
        if comm.rank == 0:
            print(f"size={comm.size} total={total} places={everyone} alone={alone}")
            print(f"torch.distributed={dist.is_initialized()}")
