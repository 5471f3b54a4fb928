"""baton.Communicator: ranks are forked processes; what numpy computes is the model."""
import array
import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import time
import traceback
import unittest
import unittest.mock

import numpy as np

import baton
import ports
from helpers import FakeTensor, in_child, in_threads

RANKS = 3


def ranks(body, n=RANKS, *, killed=(), **options):
    """Runs body(communicator) in n processes; raises what any of them raised. `killed`: those that may be ended by a signal."""
    def rank_main(comm_of):
        with comm_of() as comm:
            body(comm)

    with baton.Rendezvous(n) as server:
        processes(n, lambda rank: rank_main(lambda: baton.Communicator(rank, n, server.address, **options)), killed)


def processes(n, main, killed=()):
    children = []
    for rank in range(n):
        out, inn = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(out)
            signal.alarm(200)
            status = 1
            try:
                main(rank)
                status = 0
            except BaseException:
                os.write(inn, traceback.format_exc().encode()[-60000:])
            finally:
                os._exit(status)
        os.close(inn)
        children.append((rank, child, out))
    said = []
    for rank, child, out in children:
        with open(out, "rb") as pipe:
            text = pipe.read().decode()
        _, status = os.waitpid(child, 0)
        if status and not (rank in killed and os.WIFSIGNALED(status)):
            said.append(f"rank {rank} ended with {status}:\n{text}")
    if said:
        raise AssertionError("\n".join(said))


def refuses(kind, text, call, *arguments, **named):
    try:
        call(*arguments, **named)
    except kind as why:
        assert text in str(why), f"{text!r} is not in {str(why)!r}"
        return
    raise AssertionError(f"no {kind.__name__} with {text!r}")


# --- the model: all ranks' inputs are known everywhere

TYPES = ["float32", "float16", "float64", "int8", "uint8", "int32", "int64", "uint32", "uint64", "bool"]
MOVED = ["int16", "uint16", "complex64", "datetime64[s]", [("a", "i4"), ("b", "f8")]]
FOLDS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
         "or": np.bitwise_or, "xor": np.bitwise_xor}


def inputs(dtype, shape, seed, n):
    """Small whole numbers: sums and products are exact in every type and order."""
    random = np.random.default_rng(seed)
    if dtype == "bool":
        return [random.integers(0, 2, shape).astype("bool") for _ in range(n)]
    numbers = [random.integers(0, 4, shape) for _ in range(n)]
    return [one.astype("i8").astype(dtype) if not isinstance(dtype, list) else np.full(shape, np.array((3, 4.5), dtype))
            for one in numbers]


def folded(op, all_of):
    with np.errstate(all="ignore"):
        out = all_of[0]
        for one in all_of[1:]:
            out = FOLDS[op](out, one, dtype=out.dtype)
        return out


def ops_of(dtype):
    return [op for op in FOLDS if op in ("sum", "prod", "min", "max") or np.dtype(dtype).kind in "iub"]


def check(got, wanted, what):
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, f"{what}: {got.dtype}{got.shape}"
    assert (got == wanted).all(), f"{what}: {got} is not {wanted}"


def reductions(comm):
    n, r = comm.ranks, comm.rank
    for dtype in TYPES:
        for seed, op in enumerate(ops_of(dtype)):
            what = f"{op} of {dtype}"
            all_of = inputs(dtype, (2 * n, 5), seed, n)
            wanted = folded(op, all_of)
            check(comm.all_reduce(all_of[r], np.empty_like(wanted), op), wanted, what)
            here = all_of[r].copy()
            assert comm.all_reduce(here, op=op) is here
            check(here, wanted, what + " in place")
            check(comm.reduce_scatter(all_of[r], op=op), wanted[2 * r:2 * r + 2], what)
            here = all_of[r].copy()
            comm.reduce_scatter(here, here[2 * r:2 * r + 2], op)
            check(here[2 * r:2 * r + 2], wanted[2 * r:2 * r + 2], what + " in place")
            root = seed % n
            got = comm.reduce(all_of[r].copy(), op=op, root=root)
            assert (got is None) == (r != root)
            if r == root:
                check(got, wanted, what)
            counts = [5 * (rank + 1) for rank in range(n)]
            part = comm.reduce_scatter_v(all_of[r], counts, np.empty(counts[r], dtype), op)
            start = sum(counts[:r])
            check(part, wanted.ravel()[start:start + counts[r]], what)
    mean = comm.all_reduce(np.full(4, 3.0 * r), op="avg")
    check(mean, np.full(4, 1.5 * (n - 1)), "avg")
    scaled = comm.all_reduce(np.ones(4, np.float32), op="premulsum", factor=r + 1)
    check(scaled, np.full(4, n * (n + 1) / 2, np.float32), "premulsum")
    check(comm.all_reduce(np.array(r), op="max"), np.array(n - 1), "no dimension")
    check(comm.all_reduce(np.empty((0, 3))), np.empty((0, 3)), "nothing")


def groups_of_calls(comm):
    n, r = comm.ranks, comm.rank
    for turn in range(20):
        mine, theirs, sums = np.full(1000, r), np.empty(1000, int), np.ones(5)
        with comm.group() as both:
            sent = comm.send_async(mine, (r + 1) % n)
            got = comm.receive_async(theirs)
            refuses(baton.NotAllowedError, "group", both.wait)
            refuses(baton.NotAllowedError, "group", got.wait)
            refuses(baton.InvalidParamError, "rank", comm.send_async, mine, n)
        summed = comm.all_reduce_async(sums)  # behind it: in no group
        if turn % 2:
            assert got.wait() is theirs and sent.wait() is None
        assert both.wait()[1] is theirs and got.done()
        check(theirs, np.full(1000, (r - 1) % n), "what the left one sent")
        assert got.source == (r - 1) % n
        check(summed.wait(), np.full(5, n, float), "beside it")
    with comm.group() as none:
        pass
    assert none.wait() == []
    # More than there is room for at a time.
    many = [np.ones(5) for _ in range(600)]
    with comm.group() as all_of_them:
        for one in many:
            comm.all_reduce_async(one)
    assert all_of_them.wait() == many
    check(np.stack(many), np.full((600, 5), n, float), "many")
    asyncio.run(groups_of_tasks(comm))
    with contextlib.suppress(KeyError), comm.group() as broken:
        comm.all_reduce_async(many[0])
        raise KeyError
    broken.wait()
    assert comm.stats()["link_bytes"] >= 0
    comm.barrier()


async def groups_of_tasks(comm):
    """Each task is in the group that it has opened, whichever is open beside it."""
    turn = asyncio.Event()

    async def first():
        with comm.group() as group:
            one = comm.barrier_async()
            turn.set()
            await asyncio.sleep(0)
            with comm.group() as inner:
                two = comm.barrier_async()
            three = comm.barrier_async()
        await group
        await inner
        return one._group is group and two._group is inner and three._group is group

    async def second():
        await turn.wait()
        outside = comm.barrier_async()
        with comm.group() as group:
            inside = comm.barrier_async()
            await asyncio.sleep(0)
        await outside
        await group
        return outside._group is None and inside._group is group

    assert await asyncio.gather(first(), second()) == [True, True]

    async def behind():
        return comm.barrier_async()

    with comm.group() as over:
        later = asyncio.create_task(behind())
    await over
    await (await later)


def moves(comm):
    n, r = comm.ranks, comm.rank
    for seed, dtype in enumerate(TYPES + MOVED):
        what, root = str(dtype), seed % n
        all_of = inputs(dtype, (n, 4), seed, n)
        check(comm.all_gather(all_of[r]), np.stack(all_of), what)
        here = np.zeros((n, n, 4), all_of[0].dtype)
        here[r] = all_of[r]
        check(comm.all_gather(here[r], here), np.stack(all_of), what + " in place")
        check(comm.broadcast(all_of[r].copy(), root), all_of[root], what)
        check(comm.all_to_all(all_of[r]), np.stack([one[r] for one in all_of]), what)
        check(comm.scatter(all_of[r], root=root) if r == root else comm.scatter(out=np.empty((1, 4), all_of[0].dtype), root=root),
              all_of[root][r:r + 1], what)
        got = comm.gather(all_of[r], root=root)
        assert (got is None) == (r != root)
        if r == root:
            check(got, np.stack(all_of), what)
        counts = [rank + 1 for rank in range(n)]
        got = comm.all_gather_v(all_of[r].ravel()[:r + 1].copy(), counts, np.empty(sum(counts), all_of[0].dtype))
        check(got, np.concatenate([one.ravel()[:rank + 1] for rank, one in enumerate(all_of)]), what)
        # Rank a sends b + 1 elements to rank b.
        got = comm.all_to_all_v(all_of[r], counts, np.empty(n * (r + 1), all_of[0].dtype), [r + 1] * n)
        start = sum(counts[:r])
        check(got, np.concatenate([one.ravel()[start:start + r + 1] for one in all_of]), what)
        sent = comm.send_async(all_of[r], (r + 1) % n)
        check(comm.receive(np.empty_like(all_of[r]), (r - 1) % n), all_of[(r - 1) % n], what)
        sent.wait()
    comm.barrier()


class OnlyDLPack:
    def __init__(self, inside):
        self.inside = inside

    def __dlpack__(self, **how):
        return self.inside.__dlpack__()

    def __dlpack_device__(self):
        return self.inside.__dlpack_device__()


def buffers(comm):
    n = comm.ranks
    bf16 = FakeTensor(np.array([0x3F80, 0x4000], np.uint16), "bfloat16")  # 1, 2
    comm.all_reduce(bf16, op="max")
    assert bf16.words.tolist() == [0x3F80, 0x4000]
    e4m3 = FakeTensor(np.array([0x38], np.uint8), "float8_e4m3fn")  # 1
    comm.all_reduce(e4m3)
    assert e4m3.words.tolist() == [{1: 0x38, 2: 0x40, 3: 0x44}[n]], e4m3.words
    packed = np.full(4, 1.0, np.float32)
    comm.all_reduce(OnlyDLPack(packed))
    check(packed, np.full(4, n, np.float32), "DLPack")
    numbers = array.array("q", [1, 2])
    comm.all_reduce(numbers)
    assert numbers.tolist() == [n, 2 * n]
    bits = bytearray([1 << comm.rank])
    comm.all_reduce(memoryview(bits), op="or")
    assert bits[0] == 2 ** n - 1
    word = bytearray(5)
    comm.broadcast(b"hello" if comm.rank == 0 else word)  # the root only reads
    assert comm.rank == 0 or word == b"hello"
    frozen = np.ones(3)
    frozen.flags.writeable = False
    check(comm.all_reduce(frozen, np.empty(3)), np.full(3, float(n)), "a read-only input")


# --- bad input

def bad_input(comm):
    wrong, n = baton.InvalidParamError, comm.ranks
    frozen = np.ones(3)
    frozen.flags.writeable = False
    for kind, text, call in (
            (wrong, "data is not contiguous", lambda: comm.all_reduce(np.ones((4, 4))[:, ::2])),
            (wrong, "data is not contiguous", lambda: comm.all_reduce(np.ones((4, 4)).T)),
            (wrong, "out is not contiguous", lambda: comm.all_reduce(np.ones(2), np.ones(4)[::2])),
            (wrong, "not contiguous", lambda: comm.all_reduce(FakeTensor(np.ones(2), "float64", False))),
            (wrong, "data is read-only", lambda: comm.all_reduce(frozen)),
            (wrong, "out is read-only", lambda: comm.all_reduce(np.ones(3), frozen)),
            (wrong, "out is read-only", lambda: comm.receive(b"hello", (comm.rank + 1) % n)),
            (wrong, "data is int16: it must be one of float32", lambda: comm.all_reduce(np.ones(2, np.int16))),
            (wrong, "data is complex64", lambda: comm.reduce(np.ones(2, np.complex64))),
            (wrong, "data is float64 and out is float32", lambda: comm.all_reduce(np.ones(2), np.ones(2, np.float32))),
            (wrong, "data has 2 elements, and out has 3", lambda: comm.all_reduce(np.ones(2), np.ones(3))),
            (wrong, "out must have", lambda: comm.all_gather(np.ones(2), np.ones((n + 1) * n))),
            (wrong, "equal parts", lambda: comm.all_to_all(np.ones(n + 1), np.ones(n + 1))),
            (wrong, "multiple", lambda: comm.reduce_scatter(np.ones(n + 1))),
            (wrong, "op is 'mean': it is one of sum", lambda: comm.all_reduce(np.ones(2), op="mean")),
            (wrong, "xor", lambda: comm.all_reduce(np.ones(2), op="xor")),
            (wrong, "factor", lambda: comm.all_reduce(np.ones(2), op="premulsum")),
            (wrong, "root", lambda: comm.broadcast(np.ones(2), n)),
            (wrong, "rank", lambda: comm.send(np.ones(2), comm.rank)),
            (wrong, "32 bits", lambda: comm.send(np.ones(2), 1 << 40)),
            (wrong, "pass `out`", lambda: comm.scatter(root=(comm.rank + 1) % n)),
            (wrong, "pass `out`", lambda: comm.all_gather(b"hello")),
            (wrong, "one for each", lambda: comm.all_to_all_v(np.ones(2), [1], np.ones(2), [1])),
            (wrong, "not inside", lambda: comm.all_to_all_v(np.ones(2), [9] * n, np.ones(2), [0] * n)),
            (wrong, "not inside", lambda: comm.all_gather_v(np.ones(1), [1] * n, np.ones(n), [-1] * n)),
            (wrong, "counts says", lambda: comm.all_gather_v(np.ones(2), [1] * n, np.ones(n))),
            (wrong, "timeout is 0", lambda: comm.barrier(timeout=0)),
            (wrong, "is no call", lambda: comm.explain("sum", 8)),
            # What would be cut to the bits that a place in the library has.
            (wrong, "color is 4294967296: it has 32 bits", lambda: comm.split(1 << 32)),
            (wrong, "key is -2147483649: it has 32 bits", lambda: comm.split(0, -(1 << 31) - 1)),
            (wrong, "rank is 4294967296: it has 32 bits", lambda: comm.subgroup([1 << 32, comm.rank])),
            (wrong, "uuid is -1", lambda: comm.reconfigure(comm.handles(), -1)),
            (wrong, "uuid is 18446744073709551616", lambda: comm.reconfigure(comm.handles(), 1 << 64)),
            # What the library would sum as numbers that it is not, or move as addresses.
            (wrong, "data is >f4: it must be one of float32", lambda: comm.all_reduce(np.ones(2, ">f4"))),
            (wrong, "data is >f", lambda: comm.all_reduce(memoryview(np.ones(2, ">f4")))),
            (wrong, "data holds Python objects", lambda: comm.all_gather(np.array([comm]))),
            (wrong, "out holds Python objects", lambda: comm.receive(np.array([comm]))),
            (wrong, "data holds Python objects", lambda: comm.broadcast(np.zeros(2, [("a", "i4"), ("b", "O")]))),
            (wrong, "broadcast: pass an array", lambda: comm.broadcast(None)),
            (wrong, "all_reduce: pass an array", lambda: comm.all_reduce(None)),
            (wrong, "send: pass an array", lambda: comm.send(None, (comm.rank + 1) % n)),
            (TypeError, "DataFrame", lambda: comm.all_reduce(type("DataFrame", (), {})())),
            (TypeError, "int", lambda: comm.all_reduce(5)),
            (TypeError, "unexpected keyword", lambda: comm.barrier(priority=5))):
        refuses(kind, text, call)
    check(comm.all_reduce(np.ones(2)), np.full(2, float(n)), "after all that")


def closed(comm):
    work = comm.barrier_async()
    ended = comm.all_reduce_async(np.ones(2))
    ended.wait()
    work.wait()
    late = comm.receive_async(np.empty(2), (comm.rank + 1) % comm.ranks)
    comm.barrier()
    comm.close()
    comm.close()
    for call in (comm.barrier, late.wait, late.done, comm.stats, comm.abort, lambda: comm.all_reduce(np.ones(2))):
        refuses(baton.InvalidParamError, "the communicator is closed", call)
    check(ended.wait(), np.full(2, float(comm.ranks)), "what ended before")


def mismatching(comm):
    refuses(baton.InvalidParamError, "rank 1", comm.all_reduce, np.ones(2 if comm.rank == 0 else 3))
    refuses(baton.InvalidParamError, "rank 1", comm.barrier)  # as that one


def forked(comm):
    in_child(lambda: refuses(baton.InvalidParamError, "forked", comm.barrier))
    comm.barrier()


# --- works

def works(comm):
    many = [comm.all_reduce_async(np.full(3, i)) for i in range(200)]
    assert all((work.wait() == comm.ranks * i).all() for i, work in enumerate(many))
    for i in range(600):  # nothing waits for these
        comm.all_reduce_async(np.ones(2))
    one = comm.barrier_async()
    assert one.wait() is None and one.wait() is None and one.done() and one.result is None
    shared = comm.all_reduce_async(np.ones(1 << 16))
    outcomes = in_threads(lambda _: shared.wait()[0], range(4))
    assert outcomes == [comm.ranks] * 4, outcomes
    waits = comm.receive_async(np.empty(1), (comm.rank - 1) % comm.ranks)
    refuses(baton.BatonTimeoutError, "", waits.wait, 0.01)
    refuses(baton.InvalidParamError, "still runs", lambda: waits.result)
    comm.barrier()
    comm.send(np.full(1, float(comm.rank)), (comm.rank + 1) % comm.ranks)
    assert waits.wait()[0] == (comm.rank - 1) % comm.ranks and "done" in repr(waits)


def many_sends(comm):
    """Each start of one more looks at a few of those that are in flight, and not at all of them."""
    count, looks, done = 1000, [], baton.communicator.Work.done
    if comm.rank == 0:
        with unittest.mock.patch.object(baton.communicator.Work, "done", lambda work: looks.append(work) or done(work)):
            sends = [comm.send_async(np.full(3, i), 1, tag=i) for i in range(count)]
        assert len(looks) < 10 * count, len(looks)
        assert all(work.wait() is None for work in sends)
    else:
        for i in reversed(range(count)):
            check(comm.receive(np.empty(3, int), 0, tag=i), np.full(3, i), "one of many")


def awaited(comm):
    async def main():
        first = await comm.all_reduce_async(np.ones(2))
        both = await asyncio.gather(*(comm.all_reduce_async(np.full(2, i)) for i in range(20)))
        task = asyncio.create_task(comm.all_gather_async(np.full(1, comm.rank)))
        late = comm.receive_async(np.empty(1), (comm.rank - 1) % comm.ranks)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(late, 0.01)
        await comm.barrier_async()  # a wait that was cancelled changes nothing
        sent = comm.send_async(np.full(1, 5.0), (comm.rank + 1) % comm.ranks)
        return first, both, await task, await late, await sent

    async def sleeps():
        """The other ranks come later: the task that awaits them leaves the processor to others."""
        turn, ended = comm.barrier_async(), comm.receive_async(np.empty(1), tag=9) if comm.rank == 0 else None
        await turn
        if ended:
            task = asyncio.create_task(ended)
            used, began = time.process_time(), time.monotonic()
            await asyncio.sleep(0.3)
            used, began = time.process_time() - used, time.monotonic() - began
            assert comm._background or used < began / 2, (used, began)
        await comm.barrier_async()
        if comm.rank == 1:
            comm.send(np.full(1, 2.0), 0, tag=9)
        assert not ended or (await task)[0] == 2.0

    asyncio.run(sleeps())
    first, both, gathered, late, _ = asyncio.run(main())
    assert first[0] == comm.ranks and late[0] == 5 and gathered.ravel().tolist() == list(range(comm.ranks))
    assert [one[0] for one in both] == [comm.ranks * i for i in range(20)]


def told(comm):
    heard, seen = [], []
    work = comm.all_reduce_async(np.ones(2), on_end=lambda work, error: heard.append((work, error)))
    work.wait()
    assert heard == [(work, None)], heard

    began = []
    comm.barrier_async(on_end=lambda work, error: began.append(comm.all_reduce_async(np.ones(3)))).wait()
    check(began[0].wait(), np.full(3, float(comm.ranks)), "a call that a callback started")

    def raises(work, error):
        raise RuntimeError("in a callback")

    hook, sys.unraisablehook = sys.unraisablehook, seen.append
    try:
        comm.barrier_async(on_end=raises).wait()
    finally:
        sys.unraisablehook = hook
    assert len(seen) == 1 and "in a callback" in str(seen[0].exc_value), seen
    comm.barrier()


def in_background(main):
    def body(rank, address):
        with baton.Endpoint(background=True) as endpoint, baton.Communicator(rank, RANKS, address, endpoint=endpoint) as comm:
            main(comm)

    with baton.Rendezvous(RANKS) as server:
        processes(RANKS, lambda rank: body(rank, server.address))


# --- ranks that go away

def dies(comm):
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    refuses(baton.RemoteDisconnectError, "rank 1", comm.all_reduce, np.ones(1 << 16))
    assert comm.lost_ranks() == [1]
    refuses(baton.RemoteDisconnectError, "rank 1", comm.barrier)
    with comm.shrink() as left:
        assert left.ranks == RANKS - 1 and left.rank == (0 if comm.rank == 0 else 1)
        check(left.all_reduce(np.ones(2)), np.full(2, left.ranks * 1.0), "those left")


# --- groups from handles

def exchange(rank, n, address, endpoint):
    """All handles, by a group that exists for that alone."""
    with baton.Communicator(rank, n, address) as comm:
        return [bytes(one) for one in comm.all_gather(np.frombuffer(endpoint.handle, np.uint8))]


def groups(rank, address):
    with baton.Endpoint() as endpoint:
        handles = exchange(rank, RANKS, address, endpoint)
        with baton.Communicator.from_handles(endpoint, handles, 77) as comm:
            comm.wait_ready(100)
            assert comm.ready() and comm.handles() == handles and (comm.rank, comm.ranks) == (rank, RANKS)
            check(comm.all_reduce(np.ones(2)), np.full(2, RANKS * 1.0), "a group of handles")
            part = comm.split(-1 if rank == 1 else 3, key=-rank)
            assert (part is None) == (rank == 1)
            if part is not None:
                with part:
                    assert part.all_gather(np.full(1, rank)).ravel().tolist() == [2, 0]
            if rank:
                with comm.subgroup([2, 1]) as pair:
                    assert pair.all_gather(np.full(1, rank)).ravel().tolist() == [2, 1]
            memory = np.frombuffer(endpoint.allocate(4096), np.float32)
            assert (memory == 0).all()
            memory += rank
            check(comm.all_reduce(memory), np.full(1024, 3, np.float32), "memory of the endpoint")
            tagged = [comm.send_async(np.full(1, tag), (rank + 1) % RANKS, tag) for tag in (1, 2)] if rank == 0 else []
            if rank == 1:
                late = comm.receive_async(np.empty(1, np.int64), baton.ANY_RANK, 2)
                assert late.wait()[0] == 2 and late.source == 0
                assert comm.receive(np.empty(1, np.int64), 0, 1)[0] == 1
            for work in tagged:
                work.wait()
            comm.barrier()
            if rank == 0:
                comm.abort("on to other members")
            refuses(baton.CancelledError, "other members", comm.barrier)
            if rank < 2:
                comm.reconfigure(handles[:2], 78).wait(100)
                assert comm.ranks == 2
                check(comm.all_reduce(np.ones(2)), np.full(2, 2.0), "after reconfigure()")
            comm.close()
            endpoint.close()
            memory += 1  # is there as long as it is used
            assert memory[5] == 4
        refuses(baton.InvalidParamError, "the endpoint is closed", endpoint.allocate, 5)
        refuses(baton.InvalidParamError, "is no handle", baton.Communicator.from_handles, endpoint, [b"x"], 5)
    with baton.Endpoint() as endpoint:
        refuses(baton.InvalidParamError, "handle 0", baton.Communicator.from_handles, endpoint, [bytes(96)], 5)
        refuses(baton.InvalidParamError, "at least one", endpoint.allocate, 0)


class CommunicatorTest(unittest.TestCase):
    def test_reductions_are_numpys(self):
        ranks(reductions)

    def test_moves_are_numpys(self):
        ranks(moves)

    # Promise(python): Calls inside `with comm.group()` are waited for as one | by all of them, or by any one
    def test_groups_of_calls(self):
        ranks(groups_of_calls)

    def test_one_rank(self):
        with baton.Communicator(0, 1) as comm:
            check(comm.all_reduce(np.full(2, 7)), np.full(2, 7), "alone")
            self.assertEqual(comm.all_gather(np.ones((2, 2))).shape, (1, 2, 2))
            self.assertIn("rank 0 of 1", repr(comm))

    def test_buffers_of_all_kinds(self):
        ranks(buffers)

    def test_what_makes_no_sense_is_refused_and_breaks_nothing(self):
        ranks(bad_input)

    def test_after_close(self):
        ranks(closed)

    # Promise(python): Ranks of a baton.Communicator that call different things raise, each of them | the checks of
    #   the library; the communicator says the same from then on
    def test_ranks_that_mismatch(self):
        ranks(mismatching, 2)

    def test_a_forked_child_is_refused(self):
        ranks(forked, 2)

    def test_works(self):
        ranks(works)

    # Promise(python): Calls between two ranks that have not ended do not slow down the start of more of them | how often
    #   they are looked at is counted
    def test_many_sends(self):
        ranks(many_sends, 2)

    def test_works_are_awaited(self):
        ranks(awaited)

    def test_works_are_awaited_with_a_background_thread(self):
        in_background(awaited)
        in_background(works)

    # Promise(python): An exception in a callback of a call is reported, and ends neither the call nor the
    #   process | sys.unraisablehook
    def test_callbacks(self):
        ranks(told)
        in_background(told)

    # Promise(python): A rank of a baton.Communicator that is killed raises RemoteDisconnectError at every other, by its
    #   number; the others go on without it | shrink()
    def test_a_rank_that_is_killed(self):
        ranks(dies, killed=(1,))

    def test_groups_of_handles(self):
        with baton.Rendezvous(RANKS) as server:
            processes(RANKS, lambda rank: groups(rank, server.address))

    def test_ranks_that_do_not_come(self):
        with baton.Rendezvous(2) as server:
            refuses(baton.BatonTimeoutError, "1", baton.Communicator, 0, 2, server.address, start_timeout=0.05)
        refuses(baton.InvalidParamError, "rank", baton.Communicator, 5, 2, "127.0.0.1:1")
        refuses(baton.InvalidParamError, "at least 0", baton.Communicator, -1, 2, "127.0.0.1:1")

    def test_the_environment(self):
        names = ("BATON_RANK", "BATON_RANKS", "BATON_RENDEZVOUS")
        for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", *names):
            os.environ.pop(name, None)
        refuses(baton.NotFoundError, "torchrun", baton.Communicator.from_environment)

        def main(rank, address):
            os.environ.update(zip(names, (str(rank), "2", address)))
            with baton.Communicator.from_environment(name="env", timeout=50) as comm:
                assert (comm.rank, comm.ranks) == (rank, 2)
                comm.barrier()

        address = f"127.0.0.1:{ports.free_ports(1)}"  # where rank 0 serves
        processes(2, lambda rank: main(rank, address))
        os.environ.update(BATON_RANK="two", BATON_RANKS="2")
        refuses(baton.InvalidParamError, "BATON_RANK", baton.place_from_environment)
        for name in names:
            os.environ.pop(name, None)

    # Promise(python): Communicators leave no descriptor, thread or shared memory behind | 100 are made and closed
    def test_nothing_is_left(self):
        def count():
            gc.collect()
            with open("/proc/self/maps", encoding="utf8") as maps:
                shared = sum("memfd:" in line for line in maps)
            return [shared, *(len(os.listdir(folder)) for folder in ("/proc/self/fd", "/proc/self/task"))]

        def once():
            with baton.Endpoint() as endpoint:
                endpoint.allocate(1 << 16)
            with baton.Rendezvous(2) as server:
                def other():
                    with baton.Communicator(1, 2, server.address) as comm:
                        comm.barrier()

                thread = threading.Thread(target=other)
                thread.start()
                with baton.Communicator(0, 2, server.address) as comm:
                    comm.barrier()
                thread.join()

        once()
        before = count()
        for _ in range(50):
            once()
        until = time.monotonic() + 100
        while any(now > then for now, then in zip(count(), before)) and time.monotonic() < until:
            time.sleep(0.01)
        self.assertTrue(all(now <= then for now, then in zip(count(), before)), (before, count()))


if __name__ == "__main__":
    unittest.main()
