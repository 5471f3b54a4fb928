"""Two ranks sum their gradients while they compute, and gather what each has of a result. Under torchrun, mpirun or srun a rank
is made by baton.Communicator.from_environment(); here the program forks them."""
import array
import asyncio
import os

import baton

RANKS = 2


async def rank_main(rank, rendezvous):
    with baton.Communicator(rank, RANKS, rendezvous) as comm:
        gradients = array.array("f", [rank + 1] * 65536)  # or a numpy array, a torch tensor
        work = comm.all_reduce_async(gradients, op="avg")
        # ... compute ...
        await work  # or work.wait(timeout=5), in a thread
        words = bytearray(5 * RANKS)
        comm.gather(b"hello" if rank == 0 else b"world", words, root=0)
        if rank == 0:
            print("the mean gradient is", gradients[-1], words.decode())


def main():
    with baton.Rendezvous(RANKS) as server:
        other = os.fork()
        asyncio.run(rank_main(1 if other == 0 else 0, server.address))
        if other == 0:
            os._exit(0)
        os.waitpid(other, 0)


main()
