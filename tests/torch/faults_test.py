"""What a rank that is killed, stopped, late, or calls something else looks like at the others, and wrong use of a process."""
import atexit
import datetime
import gc
import os
import signal
import tempfile
import threading
import time

import torch
import torch.distributed as dist

import baton.torch
import ranks
from baton.torch import _build
from ranks import Ranks, at_ranks, compiled, raises, run

SIZE, VICTIM = 4, 2


def reports(folder, rank, what):
    with open(os.path.join(folder, f"{rank}.{what}"), "w"):
        pass


def await_file(folder, rank, what):
    while not os.path.exists(os.path.join(folder, f"{rank}.{what}")):
        time.sleep(0.01)


def keeps_calling(rank, size, folder, timeout):
    """Calls until one fails; returns what that said, and when, on the clock that all processes share."""
    dist.barrier()
    reports(folder, rank, "ready")
    try:
        while True:
            dist.all_reduce(torch.ones(1000))
    except dist.DistBackendError as why:
        return str(why), time.monotonic()


def harmed(number, timeout):
    with tempfile.TemporaryDirectory() as folder, Ranks(keeps_calling, SIZE, folder, timeout, timeout=timeout) as group:
        for rank in range(SIZE):
            await_file(folder, rank, "ready")
        time.sleep(0.2)
        then = time.monotonic()
        group.send(VICTIM, number)
        told = [group.result(rank) for rank in range(SIZE) if rank != VICTIM]
        for text, _ in told:
            assert f"rank {VICTIM}" in text, text
        return max(when - then for _, when in told)


# Promise(torch): a killed rank ends every survivor's call, whose error names it | kill -9 of a rank of four
def test_killed():
    print(f"        kill -9: told in {harmed(signal.SIGKILL, 60):.2f} s")


# Promise(torch): a stopped rank ends every survivor's call at its timeout, and the error names it | SIGSTOP of a rank of four
def test_stopped():
    print(f"        SIGSTOP: told {harmed(signal.SIGSTOP, 3) - 3:.2f} s after the deadline of 3 s")


@at_ranks(2, folder=True, timeout=1)
def test_late(rank, size, folder):
    if rank == 0:
        await_file(folder, 1, "given-up")
        # What the others had sent may still be there for one call.
        raises(dist.DistBackendError, lambda: [dist.all_reduce(torch.ones(2)) for _ in range(3)], "rank 1")
        return
    # A wait has a timeout of its own, after which the call goes on.
    work = dist.all_reduce(torch.ones(2), async_op=True)
    raises(dist.DistBackendError, lambda: work.wait(datetime.timedelta(milliseconds=50)), "goes on")
    assert not work.is_completed() or not compiled()
    raises(dist.DistBackendError, work.wait, "rank 0", "timeout")
    reports(folder, rank, "given-up")


@at_ranks(3, folder=True)
def test_abort(rank, size, folder):
    dist.barrier()
    if rank == 0:  # nothing is called here: the others wait until they abort
        for other in range(1, size):
            await_file(folder, other, "aborted")
        return
    group = dist.distributed_c10d._get_default_group()
    timer = threading.Timer(0.3, group.abort)
    timer.start()
    start = time.monotonic()
    raises(dist.DistBackendError, lambda: dist.all_reduce(torch.ones(4)))
    assert time.monotonic() - start < 20, "of 60 s"
    reports(folder, rank, "aborted")
    timer.join()


@at_ranks(2, folder=True)
# Promise(torch): Ctrl-C ends a wait, and the group goes on | SIGINT in a call that the other rank makes later
def test_interrupted(rank, size, folder):
    """Ctrl-C ends a wait and not the call, whose memory stays although the program drops it."""
    dist.barrier()
    if rank == 1:
        await_file(folder, 0, "interrupted")
    else:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        raises(KeyboardInterrupt, lambda: dist.all_reduce(torch.ones(1 << 20)))
        timer.join()
        gc.collect()
        reports(folder, 0, "interrupted")
    if rank == 1:
        tensor = torch.ones(1 << 20)
        dist.all_reduce(tensor)
        assert tensor.eq(size).all()
    dist.barrier()


def dies_with_a_group(rank, size):
    """A survivor leaves its group, and others of the same process go on."""
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        raises(dist.DistBackendError, lambda: dist.all_reduce(torch.ones(2), group=pairs[0]), "rank 0")
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=pairs[1])
    return tensor.tolist()


def test_other_groups_survive():
    with Ranks(dies_with_a_group, 3) as group:
        assert group.result(1) == group.result(2) == [2.0, 2.0]


def destroys_while_waiting(rank, size):
    """A thread waits, others take its future and give up, and the group is destroyed under all of them."""
    group = dist.new_group()
    other = dist.new_group()
    dist.barrier(other)
    if rank == 0:
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        told = []

        def waits():
            try:
                work.wait()
            except dist.DistBackendError as why:
                told.append(str(why))

        thread = threading.Thread(target=waits)
        thread.start()
        raises(dist.DistBackendError, lambda: work.wait(datetime.timedelta(milliseconds=50)), "goes on")
        future = work.get_future()
        dist.destroy_process_group(group)
        thread.join(30)
        assert not thread.is_alive() and "destroyed" in told[0], told
        raises(Exception, future.wait, "destroyed")
    dist.barrier(other)


def test_destroyed_while_waiting():
    if not compiled():  # the compiled one destroys a group when its last call has ended
        run(destroys_while_waiting, 2)


@at_ranks(2)
def test_fork_after_init(rank, size):
    dist.barrier()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(2))
            said = "went through"
        except Exception as why:
            said = str(why)
        os.write(write, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(read, 4096).decode()
    assert "fork" in said, said
    dist.barrier()  # the parent's is as it was


@at_ranks(2)
def test_fork_ends(rank, size):
    """A child that ends as an interpreter does, after its parent's callbacks have run."""
    dist.all_reduce(torch.ones(2), async_op=True).get_future().then(lambda _: None).wait()
    child = os.fork()
    if child == 0:
        atexit._run_exitfuncs()
        os._exit(3)
    end = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended[0] and os.waitstatus_to_exitcode(ended[1]) == 3, ended
    dist.barrier()


@at_ranks(1, folder=True, backend=None)
def test_ranks_that_do_not_come(rank, size, folder):
    raises(dist.DistStoreError,
           lambda: dist.init_process_group("baton", init_method=f"file://{folder}/store", rank=0, world_size=3,
                                           timeout=datetime.timedelta(seconds=1)), "[1, 2]", "timeout after 1000ms")


@at_ranks(2, folder=True, backend=None)
def test_groups_one_after_the_other_in_a_store(rank, size, folder):
    """A group, and another, in one store: a rank that comes first does not take what the first group left."""
    for turn in range(4):
        if rank == turn % size:
            time.sleep(0.05)
        within = datetime.timedelta(seconds=20)
        store = dist.FileStore(f"{folder}/store", size)
        dist.init_process_group("baton", store=store, rank=rank, world_size=size, timeout=within)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [size] * 2
        dist.destroy_process_group()


@at_ranks(3, if_compiled=True, folder=True, backend=None)
def test_ranks_with_different_backends(rank, size, folder):
    os.environ["BATON_TORCH"] = "python" if rank else "cpp"
    baton.torch._chosen = None
    place = f"file://{folder}/store"
    raises(RuntimeError, lambda: dist.init_process_group("baton", init_method=place, rank=rank, world_size=size),
           "ranks [0] have the compiled backend", "ranks [1, 2]")


def cannot_build(*words):
    return raises(_build.CannotBuild, _build.find, *words)


def test_building():
    before = dict(os.environ)
    try:
        if compiled():
            found, path = _build.find(), os.environ["PATH"]
            os.environ.update(PATH="", CXX="no-such-compiler")
            assert _build.find() == found  # it needs no compiler
            os.environ.update(PATH=path)
        with tempfile.TemporaryDirectory() as folder:
            os.environ.update(XDG_CACHE_HOME=folder, CXX="no-such-compiler")
            cannot_build("no-such-compiler")
            script = os.path.join(folder, "compiler")
            with open(script, "w") as out:
                out.write(f"#!/bin/sh\necho once >>{folder}/runs\necho error: mine >&2\nexit 1\n")
            os.chmod(script, 0o755)
            os.environ["CXX"] = f"{script} g++"  # as ccache is used
            for _ in range(3):
                cannot_build("error: mine")
            with open(f"{folder}/runs") as runs:
                assert len(runs.readlines()) == 1  # not by each rank
            raises(_build.CannotBuild, lambda: _build.find(again=True), "error: mine")
            with open(f"{folder}/runs") as runs:
                assert len(runs.readlines()) == 2
            made = _build._folder() / f"{_build.NAME}.so"
            made.touch()
            assert _build.find() == made
            made.chmod(0o666)
            cannot_build("666")
            if os.getuid() == 0:
                made.chmod(0o755)
                os.chown(made, 12345, -1)
                cannot_build("belongs to user 12345")
            assert not list(made.parent.glob("tmp*"))
    finally:
        os.environ.clear()
        os.environ.update(before)
    raises(RuntimeError, lambda: baton.torch._check_version("2.9.1+cpu"), "needs torch 2.15", "2.9.1")


if __name__ == "__main__":
    ranks.main(globals())
