"""Every call of torch.distributed over Baton beside the same over Gloo: equal results, for types, shapes, strides and forms."""
import os
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import baton.torch
import ranks
from ranks import at_ranks, compiled, raises, run

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
OTHERS = (torch.bool, torch.int16, torch.complex64, torch.complex128)  # of which Gloo moves the first


def shaped(rank, dtype, form="plain", count=12):
    """Small whole numbers, the same at each run, in memory of some form."""
    values = torch.tensor([(7 * rank + 3 * i) % 5 for i in range(count)])
    tensor = (values % 2 == 0) if dtype == torch.bool else values.to(dtype)
    if form == "transposed":
        return tensor.reshape(3, count // 3).t()
    if form == "strided":
        return torch.stack([tensor, tensor], 1)[:, 0]
    if form == "scalar":
        return tensor[0]
    return tensor


def each_call(rank, size):
    """(name, result) of many calls, in an order that is the same at every rank."""
    out = []
    op = dist.ReduceOp

    def note(name, *tensors):
        out.append((name, [tensor.clone() for tensor in tensors]))

    for dtype in FLOATS + INTEGERS:
        for how in (op.SUM, op.PRODUCT, op.MIN, op.MAX) + ((op.BAND, op.BOR, op.BXOR) if dtype in INTEGERS else ()):
            tensor = shaped(rank, dtype)
            dist.all_reduce(tensor, how)
            note(f"all_reduce {dtype} {how}", tensor)
    for dtype in FLOATS[:2]:
        tensor = shaped(rank, dtype)
        dist.all_reduce(tensor, op.AVG)
        note(f"all_reduce {dtype} AVG", tensor)
    for dtype in FLOATS + INTEGERS + OTHERS[:1]:
        for form in ("plain", "transposed", "scalar"):
            tensor = shaped(rank, dtype, form)
            dist.broadcast(tensor, 1)
            note(f"broadcast {dtype} {form}", tensor)
    for form in ("plain", "transposed", "scalar"):
        tensor = shaped(rank, torch.float32, form)
        dist.all_reduce(tensor)
        note(f"all_reduce {form}", tensor)
        tensor = shaped(rank, torch.float32, form)
        dist.reduce(tensor, size - 1)
        if rank == size - 1:
            note(f"reduce {form}", tensor)
    for form in ("plain", "scalar"):
        tensor = shaped(rank, torch.float32, form)
        parts = [torch.zeros_like(tensor) for _ in range(size)]
        dist.all_gather(parts, tensor)
        note(f"all_gather {form}", *parts)
        parts = [torch.zeros_like(tensor) for _ in range(size)] if rank == 1 else None
        dist.gather(tensor, parts, dst=1)
        note(f"gather {form}", *(parts or []))
        tensor = torch.zeros_like(tensor)
        dist.scatter(tensor, [shaped(other, torch.float32, form) for other in range(size)] if rank == 0 else None, src=0)
        note(f"scatter {form}", tensor)
    tensor = shaped(rank, torch.complex64)
    dist.all_reduce(tensor)
    note("all_reduce complex64", tensor)

    whole = torch.zeros(size * 6)
    dist.all_gather_into_tensor(whole, shaped(rank, torch.float32, count=6))
    note("all_gather_into_tensor", whole)
    dist.all_gather(list(whole.chunk(size)), shaped(rank + 1, torch.float32, count=6))
    note("all_gather into chunks of one tensor", whole)
    part = torch.zeros(4)
    dist.reduce_scatter_tensor(part, shaped(rank, torch.float32, count=4 * size))
    note("reduce_scatter_tensor", part)
    dist.reduce_scatter(part, list(shaped(rank, torch.float32, count=4 * size).chunk(size)))
    note("reduce_scatter", part)
    moved = torch.zeros(3 * size, 2)
    dist.all_to_all_single(moved, shaped(rank, torch.float32, count=6 * size).view(3 * size, 2))
    note("all_to_all_single", moved)
    # Rank r sends r + 1 rows to each.
    rows = torch.zeros(sum(range(1, size + 1)), 2)
    dist.all_to_all_single(rows, torch.full(((rank + 1) * size, 2), float(rank)), [other + 1 for other in range(size)],
                           [rank + 1] * size)
    note("all_to_all_single of rows", rows)

    if rank in (0, 1):  # by tag, in another order than they were sent in
        if rank == 0:
            works = [dist.isend(torch.full((3,), float(tag)), 1, tag=tag) for tag in (5, 6)]
            for work in works:
                work.wait()
            dist.send(shaped(0, torch.float32), 1)
        else:
            tensors = {tag: torch.zeros(3) for tag in (6, 5)}
            for tag, tensor in tensors.items():
                dist.recv(tensor, 0, tag=tag)
            note("recv by tag", *tensors.values())
            tensor = torch.zeros(12)
            dist.recv(tensor, 0)
            note("recv", tensor)
    right, left = (rank + 1) % size, (rank - 1) % size
    got = torch.zeros(5)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.full((5,), float(rank)), right),
                                        dist.P2POp(dist.irecv, got, left)]):
        work.wait()
    note("batch_isend_irecv", got)

    many = [shaped(rank, torch.float32), shaped(rank, torch.float32, "transposed"), shaped(rank, torch.float64)]
    dist.all_reduce_coalesced(many[:2])
    note("all_reduce_coalesced", *many)
    futures = [dist.all_reduce(shaped(rank, torch.float32), async_op=True).get_future() for _ in range(5)]
    note("futures", *(future.wait()[0] for future in futures))
    doubled = dist.all_reduce(shaped(rank, torch.float32), async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    note("then", doubled.wait())
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * (rank + 1)})
    assert objects == [{"rank": other, "text": "x" * (other + 1)} for other in range(size)]
    objects = [("a", rank)]
    dist.broadcast_object_list(objects, 1)
    assert objects == [("a", 1)]
    tensor = functional.all_reduce(shaped(rank, torch.float32), "sum", dist.group.WORLD)
    note("functional all_reduce", tensor.wait() if hasattr(tensor, "wait") else tensor)
    tensor = functional.all_gather_tensor(shaped(rank, torch.float32), 0, dist.group.WORLD)
    note("functional all_gather", tensor.wait() if hasattr(tensor, "wait") else tensor)
    tensor = functional.reduce_scatter_tensor(shaped(rank, torch.float32, count=4 * size), "sum", 0, dist.group.WORLD)
    note("functional reduce_scatter", tensor.wait() if hasattr(tensor, "wait") else tensor)

    for members in ([0, 1], list(range(size))[::-1]):
        group = dist.new_group(members)
        if rank in members:
            tensor = shaped(rank, torch.float32)
            dist.all_reduce(tensor, group=group)
            note(f"new_group {members}", tensor)
    half = dist.split_group(split_ranks=[list(range(size // 2)), list(range(size // 2, size))])
    tensor = shaped(rank, torch.float32)
    dist.all_reduce(tensor, group=half)
    note("split_group", tensor)
    sparse = torch.sparse_coo_tensor([[rank, rank + 1]], [1.0, 2.0], (size + 1,))
    dist.all_reduce(sparse)
    note("all_reduce of sparse tensors", sparse.to_dense())
    dist.barrier()
    dist.monitored_barrier()
    return out


# Promise(torch): calls of torch.distributed give over Baton what they give over Gloo | both, for types, shapes, strides and forms
def test_every_call_beside_gloo():
    for size in (2, 4):
        theirs = run(each_call, size, backend="gloo")
        ours = run(each_call, size)
        for rank in range(size):
            assert [name for name, _ in ours[rank]] == [name for name, _ in theirs[rank]]
            for (name, mine), (_, other) in zip(ours[rank], theirs[rank]):
                assert len(mine) == len(other), name
                for a, b in zip(mine, other):
                    assert a.dtype == b.dtype and a.shape == b.shape, name
                    exact = a.dtype not in (torch.float16, torch.bfloat16)
                    assert torch.equal(a, b) if exact else torch.allclose(a, b, rtol=2e-2), (name, rank, a, b)


@at_ranks(3)
def test_what_gloo_has_not(rank, size):
    """What Gloo has not, or gets wrong: a tensor with gaps in its memory."""
    op = dist.ReduceOp
    for call in (dist.all_reduce, lambda x: dist.reduce(x, 0)):
        tensor = shaped(rank, torch.float32, "strided")
        call(tensor)
        if rank == 0 or call is dist.all_reduce:
            assert torch.equal(tensor, sum(shaped(other, torch.float32, "strided") for other in range(size)))
    for dtype in OTHERS:
        for form in ("plain", "transposed", "strided", "scalar"):
            tensor = shaped(rank, dtype, form)
            dist.broadcast(tensor, 1)
            assert torch.equal(tensor, shaped(1, dtype, form)), (dtype, form)
    for dtype in OTHERS[:2]:
        tensor = shaped(rank, dtype)
        dist.all_reduce(tensor, op.MAX)
        expected = torch.stack([shaped(other, dtype) for other in range(size)]).to(torch.int32).amax(0).to(dtype)
        assert torch.equal(tensor, expected), dtype
    tensor = torch.zeros(3, 4).t()
    if rank == 0:
        dist.send(shaped(0, torch.float32, "transposed"), 1)
    elif rank == 1:
        dist.recv(tensor, 0)
        assert torch.equal(tensor, shaped(0, torch.float32, "transposed"))
    for form in ("transposed", "strided"):
        tensor, every = shaped(rank, torch.float32, form), [shaped(other, torch.float32, form) for other in range(size)]
        parts = [torch.zeros_like(tensor) for _ in range(size)]
        dist.all_gather(parts, tensor)
        assert all(map(torch.equal, parts, every))
        parts = [torch.zeros_like(tensor) for _ in range(size)]
        dist.gather(tensor, parts if rank == 1 else None, dst=1)
        assert rank != 1 or all(map(torch.equal, parts, every))
        tensor = torch.zeros_like(tensor)
        dist.scatter(tensor, every if rank == 0 else None, src=0)
        assert torch.equal(tensor, every[rank])
    tensor = torch.full((4,), rank + 1, dtype=torch.int32)
    dist.all_reduce(tensor, op.AVG)
    assert tensor.tolist() == [(size * (size + 1) // 2) // size] * 4
    parts = [torch.zeros(other + 1) for other in range(size)]
    dist.all_gather(parts, torch.full((rank + 1,), float(rank)))
    assert [part.tolist() for part in parts] == [[float(other)] * (other + 1) for other in range(size)]
    outputs, inputs = [torch.zeros(other + 1) for other in range(size)], [torch.full((rank + 1,), float(rank))] * size
    dist.all_to_all(outputs, inputs)
    assert [part.tolist() for part in outputs] == [[float(other)] * (other + 1) for other in range(size)]


@at_ranks(3)
# Promise(torch): parts of a list may be empty, and of any memory | first parts, last parts and all of them, in lists and in rows
def test_parts_of_any_size(rank, size):
    """Lists whose parts are empty, lie beside each other, or are converted before they are summed."""
    counts = [4 if rank and other else 0 for other in range(size)]  # all but the first rank, which is left out
    out = torch.full((sum(counts),), -1.0)
    dist.all_to_all_single(out, torch.full((sum(counts),), float(rank)), counts, counts)
    assert out.tolist() == [float(other) for other in range(size) for _ in range(counts[other])]
    dist.all_to_all_single(torch.empty(0), torch.empty(0), [0] * size, [0] * size)
    rows = torch.empty(0, 3)  # as many of its rows for each
    dist.all_to_all_single(torch.empty(0, 3), rows, [0] * size, [])
    dist.all_to_all_single(torch.empty(0, 3), rows)
    parts = [torch.zeros(0)] + [torch.zeros(other) for other in range(1, size)]
    dist.all_gather(parts, torch.full((rank,), float(rank)))
    assert [part.tolist() for part in parts] == [[float(other)] * other for other in range(size)]
    for dtype in (torch.int16, torch.uint16, torch.int32):  # the first two are summed as another type
        whole, out = torch.arange(3 * size).to(dtype), torch.zeros(3, dtype=dtype)
        dist.reduce_scatter(out, list(whole.chunk(size)))
        assert out.tolist() == [size * value for value in range(3 * rank, 3 * rank + 3)], (dtype, out)
        dist.reduce_scatter(torch.zeros(0, dtype=dtype), [torch.zeros(0, dtype=dtype)] * size)
    # Neighbours in memory that belong to different tensors.
    memory = torch.zeros(2 * size)
    parts = [torch.from_numpy(memory.numpy()[2 * other:2 * other + 2]) for other in range(size)]
    dist.all_gather(parts, torch.full((2,), float(rank)))
    assert memory.tolist() == [float(other) for other in range(size) for _ in range(2)]


@at_ranks(2, if_compiled=True)
def test_factors_of_sums(rank, size):
    factor = dist._make_nccl_premul_sum
    for dtype, by in ((torch.int16, 3), (torch.int32, -2), (torch.float32, 0.5), (torch.bfloat16, 0.5), (torch.complex64, 0.5)):
        for given in (float(by), torch.tensor(by)):
            tensor = torch.ones(4, dtype=dtype)
            dist.all_reduce(tensor, factor(given))
            assert tensor.tolist() == [size * by] * 4, (dtype, given, tensor)
    for dtype, by in ((torch.int32, 0.5), (torch.uint8, 300.0), (torch.int16, 0.25), (torch.float16, 1e6)):
        raises(RuntimeError, lambda: dist.all_reduce(torch.ones(4, dtype=dtype), factor(by)), "cannot hold the factor")
    tensor = torch.ones(4, dtype=torch.complex64)
    raises(RuntimeError, lambda: dist.all_reduce(tensor, factor(torch.tensor(1 + 1j))), "real number")


@at_ranks(3, if_compiled=True)  # torch's glue for Python does not pass on from which
def test_receive_from_any_rank(rank, size):
    if rank:
        dist.send(torch.full((2,), float(rank)), 0)
        return None
    tensor = torch.zeros(2)
    came = sorted((dist.recv(tensor), tensor[0].item()) for _ in range(size - 1))
    assert came == [(other, float(other)) for other in range(1, size)]


@at_ranks(3)
def test_works_and_futures(rank, size):
    works = [dist.all_reduce(torch.ones(8), async_op=True) for _ in range(300)]  # more than the library has in flight
    for work in works:
        assert work.wait() and (work.is_completed() or not compiled())
    many = [torch.ones(2) for _ in range(300)]  # of one work
    dist.all_reduce_coalesced(many)
    assert all(tensor.tolist() == [size] * 2 for tensor in many)
    if compiled():
        work = dist.all_reduce(torch.ones(8), async_op=True)
        while not work.is_completed():
            pass
        work.wait()
    # Nothing waits for these before another group's barrier: they go on by themselves.
    other = dist.new_group()
    work = dist.broadcast(torch.ones(8), 0, async_op=True) if rank else None
    dist.barrier(other)
    if rank == 0:
        dist.broadcast(torch.ones(8), 0)
    dist.barrier(other)
    if work:
        work.wait()


@at_ranks(2)
# Promise(torch): 300 sends of each side may be in flight before the first receive | two ranks, tags in both orders
def test_many_messages_in_flight(rank, size):
    """More messages than a group has collectives in flight, sent by both sides before either receives, and received in any order."""
    other, count = 1 - rank, 300
    for order in (range(count), reversed(range(count))):
        sends = [dist.isend(torch.full((100,), float(tag)), other, tag=tag) for tag in range(count)]
        came = {tag: torch.zeros(100) for tag in order}
        for work in [dist.irecv(tensor, other, tag=tag) for tag, tensor in came.items()] + sends:
            work.wait()
        assert all(tensor.tolist() == [float(tag)] * 100 for tag, tensor in came.items())
    came = [torch.zeros(8) for _ in range(count)]
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.full((8,), float(n)), other) for n in range(count)] +
                                       [dist.P2POp(dist.irecv, tensor, other) for tensor in came]):
        work.wait()
    assert all(tensor.tolist() == [float(n)] * 8 for n, tensor in enumerate(came))


@at_ranks(2)
def test_wrong_arguments_break_nothing(rank, size):
    raises((RuntimeError, ValueError), lambda: dist.all_reduce(torch.ones(2, dtype=torch.float8_e5m2fnuz)), "baton")
    raises(RuntimeError, lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BXOR), "baton", "BXOR")
    raises(RuntimeError, lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG), "baton")
    raises((RuntimeError, ValueError), lambda: dist.all_gather_into_tensor(torch.zeros(5), torch.zeros(2)), "baton")
    raises((RuntimeError, ValueError), lambda: dist.all_gather([torch.zeros(2)] * (size + 1), torch.zeros(2)))
    tensor = torch.ones(2)
    dist.all_reduce(tensor)  # nothing of that broke the group
    assert tensor.tolist() == [size, size]


@at_ranks(2)
def test_callbacks(rank, size):
    # One that starts a call and waits for it, on whatever thread it runs. What one that raises does: wrong_use_test.py.
    work = dist.all_reduce(torch.ones(2), async_op=True)
    chained = work.get_future().then(lambda f: dist.all_reduce(f.value()[0], async_op=True).get_future().wait())
    assert chained.wait()[0].tolist() == [size * size] * 2
    if compiled():
        # One that starts what another rank waits for, while this rank waits for what that one does next.
        other, first = dist.new_group(), dist.all_reduce(torch.ones(2), async_op=True)
        sent = first.get_future().then(lambda _: dist.send(torch.ones(2), 1) if rank == 0 else None)
        if rank == 1:
            dist.recv(torch.ones(2), 0)
        dist.barrier()
        sent.wait()
        dist.barrier(other)
    # Tensors that a program made in inference mode are filled by threads that are not in it.
    with torch.inference_mode():
        tensor = torch.ones(3, 2).t()
        dist.all_reduce(tensor, async_op=True).get_future().wait()
        assert tensor.tolist() == [[size] * 3] * 2
        parts = [torch.zeros(2) for _ in range(size)]
        dist.all_gather(parts, torch.ones(2), async_op=True).get_future().wait()
        assert parts[1].tolist() == [1.0] * 2


@at_ranks(2, if_compiled=True)
def test_hooks_that_raise(rank, size):
    """A hook that raises ends nothing, and the others run."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    told = []

    def raising(*_):
        told.append(1)
        raise KeyError("mine")

    for hook in (7001, 7002):
        backend.register_abort_hook(hook, raising)
    dist.barrier()
    backend.abort()
    while len(told) < 2:
        time.sleep(0.01)


def debugged(rank, size):
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size] * 3
    raises(RuntimeError, lambda: dist.all_reduce(torch.ones(3 if rank else 4)), "Detected mismatch between collectives")


def test_debug_detail():
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    try:
        run(debugged, 2)
    finally:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"
        dist.set_debug_level_from_env()


def options_of(group):
    backend = group._get_backend(torch.device("cpu"))
    return baton.torch._module().settings(backend)


@at_ranks(2, pg_options=baton.torch.Options(ordered=True, tune=False))
def test_parts_inherit_options(rank, size):
    """What a group is like is also what its parts are like: torch passes on no class of ours to split_group()."""
    assert options_of(dist.group.WORLD) == (True, False)
    assert options_of(dist.split_group(split_ranks=[list(range(size))])) == (True, False)
    assert options_of(dist.new_group(pg_options=baton.torch.Options(tune=False))) == (False, False)


def parts(rank, size):
    """Parts of the first group ask no store."""
    def no_store(*_):
        raise AssertionError("a store was asked")

    baton.torch._meet, meet = no_store, baton.torch._meet
    for members in ([0, 1], [2, 0], [0, 1]):
        group, tensor = dist.new_group(members), torch.full((2,), rank + 1.0)
        if rank in members:
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [sum(members) + 2.0] * 2, (members, tensor)
            dist.destroy_process_group(group)
    baton.torch._meet = meet


# Promise(torch): A group of ranks of the first one is made without its store, also where that was given a device | the store's part
#   raises
def test_parts_of_the_first_group():
    run(parts, 3)
    run(parts, 3, device_id=torch.device("cpu:0"))


def mixed(rank, size):
    """Two backends in one process, and Baton for the CPU alone."""
    group = dist.new_group(backend="gloo")
    for one in (None, group):
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=one)
        assert tensor.tolist() == [size] * 2


def test_two_backends():
    run(mixed, 2)
    run(mixed, 2, backend="cpu:baton")

@at_ranks(2, 3)
# Promise(torch): One-sided windows of torch put and signal; what makes no sense raises ValueError | Baton's windows, with
#   the tensor kept as long as others may write to it
def test_windows(rank, size):
    """One-sided windows: what is put is there behind its signal, and each wait takes one."""
    if not compiled():
        assert not dist.distributed_c10d._supports_window()
        return
    new_window = dist.distributed_c10d._new_window
    other = (rank + 1) % size
    source = (rank - 1) % size
    mine = torch.zeros(1000)
    window = new_window(mine)
    for turn in range(3):
        window.put(torch.full((10,), rank + 10.0 * turn), other, 100, True)
        window.put(torch.arange(4.0), other, 996, False)
        window.signal(other, False)
        window.wait_signal(source, False)
        assert mine[100:110].tolist() == [source + 10.0 * turn] * 10 and mine[996:].tolist() == [0, 1, 2, 3]
        dist.barrier()
    assert window.map_remote_tensor(rank).data_ptr() == mine.data_ptr()
    raises(RuntimeError, lambda: window.map_remote_tensor(other), "cannot be mapped")
    raises(ValueError, lambda: window.put(torch.ones(2), other, 999, False), "window has 4000 bytes")
    raises(ValueError, lambda: window.put(torch.ones(2, dtype=torch.int32), other, 0, False), "Float")
    raises(ValueError, lambda: window.signal(size, False), f"there are {size} ranks")
    window.tensor_deregister()
    raises(RuntimeError, lambda: window.signal(other, False), "tensor_register")
    window.tensor_register(torch.zeros(0, dtype=torch.int64), True)
    late = window.wait_signal(source, True)
    window.signal(other, False)
    late.wait()
    dist.barrier()


if __name__ == "__main__":
    ranks.main(globals())
