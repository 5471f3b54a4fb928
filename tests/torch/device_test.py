"""CUDA tensors over the backend, without a GPU: a device of torch's whose memory and streams are those of the strict fake of CUDA's
driver (fake_cuda.cc), in the place of CUDA. Ranks are processes, each with a fake of its own."""
import ctypes
import importlib.util
import os
import pathlib
import shlex
import subprocess
import sys
import sysconfig
import types

HERE = pathlib.Path(__file__).resolve().parent
BUILD = pathlib.Path(os.environ.get("BATON_BUILD", HERE.parents[1] / "build/release"))
FAKE = BUILD / "tests/gpudirect/fake_cuda"
if not (FAKE / "libcuda.so.1").exists():
    print(f"skipped: {FAKE}/libcuda.so.1 is not built: ./run build release baton_fake_cuda")
    sys.exit(77)
import torch
import torch.distributed as dist

# torch asks CUDA's runtime once how many devices there are, at the latest before the first backward pass. That runtime would
# take the fake for the driver, and crash: it asks here, where there is no driver yet.
if torch.version.cuda:
    torch._C._cuda_getDeviceCount()
ctypes.CDLL(str(FAKE / "libcuda.so.1"), ctypes.RTLD_GLOBAL)  # found by its name from here on

import baton.torch
from baton.torch import _build
from ranks import Ranks, at_ranks, main, raises

if baton.torch.implementation() != "cpp":
    print("skipped: there is no compiled backend here")
    sys.exit(77)


def fake_cuda():
    """The extension, compiled once for each version of it and of torch."""
    source = HERE / "fake_cuda.cc"
    out = _build._folder() / f"fake_cuda_{hash_of(source)}.so"
    if not out.exists():
        theirs = pathlib.Path(torch.__file__).parent
        includes = [theirs / "include", theirs / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
        options = [option.replace(_build.NAME, "fake_cuda") for option in _build.OPTIONS]
        made = out.with_suffix(f".{os.getpid()}")
        subprocess.run([*_build._compiler(), *options, *(word for folder in includes for word in ("-isystem", str(folder))),
                        *shlex.split(os.environ.get("CXXFLAGS", "")), str(source), "-o", str(made), f"-L{theirs}/lib",
                        "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"], check=True)
        os.rename(made, out)
    spec = importlib.util.spec_from_file_location("fake_cuda", out)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hash_of(source):
    import hashlib

    return hashlib.sha256(source.read_bytes()).hexdigest()[:16]


fake = fake_cuda()
torch.utils.rename_privateuse1_backend("fakecuda")
torch._register_device_module("fakecuda", types.SimpleNamespace(
    is_available=lambda: True, device_count=lambda: 2, current_device=lambda: 0, _is_in_bad_fork=lambda: False))
baton.torch._module().is_cuda("privateuseone")
BACKEND = "cpu:baton,fakecuda:baton"
if "fakecuda" not in dist.Backend.backend_capability["baton"]:
    dist.Backend.backend_capability["baton"].append("fakecuda")


def device(values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype).to("fakecuda")


def over(body):
    """Makes a test of what each of two ranks does."""
    @at_ranks(2, backend=BACKEND)
    def test(rank, size):
        body(rank, size)
        dist.barrier()
        assert fake.violations() == 0, f"{fake.violations()} things that a real driver would have punished"

    return test


@over
def test_every_call_moves_what_is_on_a_device(rank, size):
    for count in (1, 1000, 300_000):
        one = torch.full((count,), float(rank + 1)).to("fakecuda")
        all_in = one.clone()
        dist.all_reduce(all_in)
        assert all_in.cpu().eq(3).all()
        parts = [torch.empty_like(one) for _ in range(size)]
        dist.all_gather(parts, one)
        assert [part.cpu()[0].item() for part in parts] == [1, 2]
        row = torch.empty(size * count, device="fakecuda")
        dist.all_gather_into_tensor(row, one)
        assert row.cpu().eq(torch.tensor([1.0, 2.0]).repeat_interleave(count)).all()
        part = torch.empty_like(one)
        dist.reduce_scatter_tensor(part, row)
        assert part.cpu().eq(2 * (rank + 1)).all()
        given = torch.full((count,), float(rank)).to("fakecuda")
        dist.broadcast(given, 1)
        assert given.cpu().eq(1).all()
        swapped = torch.empty_like(row)
        dist.all_to_all_single(swapped, row)
        assert swapped.cpu().eq(rank + 1).all()
        scaled = one.clone()
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(10.0))
        assert scaled.cpu().eq(30).all()
        if rank == 0:
            dist.send(one, 1)
        else:
            dist.recv(given, 0)
            assert given.cpu().eq(1).all()
    strided = torch.arange(12.0).reshape(3, 4).add(rank).to("fakecuda").t()
    assert not strided.is_contiguous()
    dist.all_reduce(strided)
    assert strided.cpu().eq((2 * torch.arange(12.0).reshape(3, 4) + 1).t()).all()
    small = device([rank + 1], torch.int16)  # summed as another type, and put back
    dist.all_reduce(small)
    assert small.cpu().item() == 3


@over
def test_no_thread_waits_for_the_other_rank(rank, size):
    store = dist.distributed_c10d._get_default_store()
    one, made = device([5.0] * 1000), device([7.0 + rank] * 1000)
    out = torch.empty_like(one)
    if rank == 0:
        one.copy_(made)  # on the stream; the call has to see it
        dist.all_reduce(one)  # returns, although rank 1 makes no call yet
        out.copy_(one)  # behind it on the stream
        work = dist.all_reduce(one, async_op=True)
        future = work.get_future()
        assert future.done(), "what it completes with is a stream that waits"
        future.wait()
        assert not fake.idle(0), "the stream waits for rank 1"
        store.set("rank 0 goes on", "yes")
        assert out.cpu().eq(15).all()
    else:
        store.wait(["rank 0 goes on"])
        one.copy_(made)
        dist.all_reduce(one)
        dist.all_reduce(one)
    assert one.cpu().eq(30).all()


@over
def test_any_stream_may_wait(rank, size):
    """Begun on one stream, waited for on another, and once more on a third."""
    fake.use_stream(1)
    one = device([1.0 + rank] * 500)
    parts = [torch.empty_like(one) for _ in range(size)]  # each apart: they are filled behind the call
    wide = torch.arange(12.0).reshape(3, 4).to("fakecuda").t()
    works = [dist.all_gather(parts, one, async_op=True), dist.all_reduce(wide, async_op=True)]
    for stream in (2, 3):
        fake.use_stream(stream)
        for work in works:
            work.wait()
        assert [part.cpu()[0].item() for part in parts] == [1, 2]
        assert wide.cpu().eq(2 * torch.arange(12.0).reshape(3, 4).t()).all()
    fake.use_stream(0)


@over
def test_many_in_flight(rank, size):
    tensors = [device([float(i + rank)] * 50) for i in range(300)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    for i, tensor in enumerate(tensors):
        assert tensor.cpu().eq(2 * i + 1).all()
    ops = [dist.P2POp(dist.isend, tensors[0], 1 - rank), dist.P2POp(dist.irecv, tensors[1], 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert tensors[1].cpu().eq(1).all()


@over
def test_wrong_arguments_break_nothing(rank, size):
    one = device([1.0])
    raises(RuntimeError, lambda: dist.all_gather([torch.empty(1)] * 2, one), "on")
    dist.all_reduce(one)
    assert one.cpu().item() == 2
    # Objects go by the CPU.
    objects = [None, None]
    dist.all_gather_object(objects, rank)
    assert objects == [0, 1]


def dies(rank, size):
    one = device([1.0] * 1000)
    dist.all_reduce(one)
    one.cpu()
    if rank == 1:
        os._exit(0)
    work = dist.all_reduce(one, async_op=True)
    work.wait()  # no thread waits: the stream does, until the call has failed
    one.cpu()
    raises(dist.DistBackendError, lambda: dist.all_reduce(one), "rank 1")
    raises(dist.DistBackendError, work.wait, "rank 1")
    return "seen"


def test_a_rank_that_dies_lets_the_stream_go():
    with Ranks(dies, 2, backend=BACKEND) as ranks:
        assert ranks.result(0) == "seen"


def trained(where, rank):
    """DDP's weights, of several buckets, after a few steps."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).to(where)
    net = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * rank + step))
        net(batch.to(where)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [weight.detach().cpu() for weight in net.parameters()]


@over
# Promise(torch): DDP trains tensors of a device to the bits of the CPU's | buckets are summed on torch's backward threads and streams
def test_ddp_trains_to_the_bits_of_the_cpu(rank, size):
    for ours, plain in zip(trained("fakecuda", rank), trained("cpu", rank)):
        assert ours.equal(plain), (ours, plain)


if __name__ == "__main__":
    main(globals())
