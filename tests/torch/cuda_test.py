"""CUDA tensors over the backend on a GPU: two ranks share device 0. Skipped without one."""
import sys

import torch
import torch.distributed as dist

if torch.version.cuda is None or not torch.cuda.is_available():
    print("skipped: torch sees no GPU here")
    sys.exit(77)

import baton.torch
from ranks import at_ranks, main

if baton.torch.implementation() != "cpp":
    print("skipped: there is no compiled backend here")
    sys.exit(77)


@at_ranks(2)
def test_sums_are_ordered_with_the_stream(rank, size):
    torch.cuda.set_device(0)
    for count in (1, 1000, 4 << 20):
        one = torch.full((count,), rank + 1.0, device="cuda")
        for _ in range(5):
            made = one * 2  # on the stream, right before
            dist.all_reduce(made)
            assert (made / 2).eq(3).all().item()


@at_ranks(2)
def test_streams_wait_and_threads_do_not(rank, size):
    torch.cuda.set_device(0)
    store = dist.distributed_c10d._get_default_store()
    dist.all_reduce(torch.ones(1000, device="cuda"))
    torch.cuda.synchronize()
    one = torch.full((1000,), 1.0, device="cuda")
    if rank == 0:
        work = dist.all_reduce(one, async_op=True)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            work.wait()
            seen = one + 1
        work.get_future().wait()
        assert not side.query(), "it waits for rank 1, and no thread does"
        store.set("go on", "yes")
        side.synchronize()
        assert seen.eq(3).all().item()
    else:
        store.wait(["go on"])
        dist.all_reduce(one)
    assert one.eq(2).all().item()


@at_ranks(2)
def test_ddp_gives_all_ranks_the_same_gradients(rank, size):
    torch.cuda.set_device(0)
    torch.manual_seed(1)
    model = torch.nn.Linear(64, 64).cuda()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    data = torch.randn(8, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(rank))
    for _ in range(3):
        ddp.zero_grad()
        ddp(data).square().mean().backward()
        both = [torch.empty_like(model.weight.grad) for _ in range(size)]
        dist.all_gather(both, model.weight.grad)
        assert both[0].equal(both[1])


@at_ranks(2, backend="cpu:baton,cuda:nccl" if torch.cuda.device_count() > 1 else "cpu:baton")
def test_nccl_may_have_those_of_devices(rank, size):
    group = dist.new_group(backend="nccl") if torch.cuda.device_count() > 1 else None
    if group is not None:
        torch.cuda.set_device(rank)
        one = torch.ones(10, device="cuda")
        dist.all_reduce(one, group=group)
        assert one.eq(2).all().item()
    host = torch.ones(10)
    dist.all_reduce(host)
    assert host.eq(2).all()


if __name__ == "__main__":
    main(globals())
