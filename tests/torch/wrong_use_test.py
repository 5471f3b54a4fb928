"""Wrong use, in tables: how ranks join, and what they call. Each row ends at every rank, in an error of its own, and leaves nothing."""
import datetime
import gc
import os
import tempfile
import time

os.environ["TORCH_FR_DUMP_ON_TIMEOUT"] = "0"  # torch's own recorder has a thread of its own for each failure, for 15 s

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import baton.torch  # noqa: E402
import ranks  # noqa: E402
from ranks import at_ranks, raises, run  # noqa: E402

WITHIN = datetime.timedelta(seconds=20)


def until(good, what):
    end = time.monotonic() + 60
    while not good():
        assert time.monotonic() < end, what()
        time.sleep(0.01)


# --- joining ---------------------------------------------------------------------------------------

def in_store(path, times):
    """Until a rank has left its handle there so often as rank 1."""
    def left():
        with open(path, "ab+") as file:
            file.seek(0)
            return file.read().count(b"handle/1")

    until(lambda: left() >= times, lambda: f"{path}: {left()} of {times}")


def other_key(process, path):
    if process == 1:
        with open(f"{path}.key", "w") as file:
            file.write("ab" * 32)
        os.chmod(f"{path}.key", 0o600)
        os.environ["BATON_KEY_FILE"] = f"{path}.key"
    return {}


def second_of_rank_1(process, path):
    in_store(path, (2, 0, 1)[process])  # process 1, then 2, which is rank 1 as well, then rank 0
    return {"rank": min(process, 1)}


# (what, processes, what each passes to init_process_group(), what each is told; "" joins)
JOINING = (
    ("a rank that joins twice", 3, second_of_rank_1, ("", "another process has joined as rank 1", "")),
    ("a smaller group", 2, lambda process, _: {"world_size": 2 + process}, ("rank 1 one of 3", "rank 0 one of 2")),
    ("another key", 2, other_key, ("rank 1", "rank 0")),
    ("other options", 2, lambda process, _: {"pg_options": baton.torch.Options(ordered=process == 1)}, ("ordered", "ordered")),
)


def joins(process, size, how, told, path):
    def join():
        given = {"rank": process, "world_size": 2, **how(process, path)}
        dist.init_process_group("baton", store=dist.FileStore(path, given["world_size"]), timeout=WITHIN, **given)

    begun = time.monotonic()
    if told[process]:
        raises((ValueError, RuntimeError), join, told[process])
        return time.monotonic() - begun
    join()
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 2
    dist.destroy_process_group()
    return time.monotonic() - begun


# Promise(torch): Ranks that join twice, or with another world size, key or options, raise, each of them, which rank differs | a table; the
#   compiled backend and the one in Python
def test_joining():
    for what, size, how, told in JOINING:
        with tempfile.TemporaryDirectory() as folder:
            took = run(joins, size, how, told, f"{folder}/store", backend=None)
        print(f"        {what}: {max(took):.2f} s")


# --- calling ---------------------------------------------------------------------------------------

def differ(group, rank, calls):
    raises((RuntimeError, ValueError), lambda: calls[rank](group), f"rank {1 - rank}")


def in_flight(group, rank):
    if rank == 0:  # its destruction ends it
        dist.all_reduce(torch.ones(2), group=group, async_op=True)


def aborted(group, rank):
    work = dist.all_reduce(torch.ones(2), group=group, async_op=True) if rank == 0 else None
    if work:
        group.abort()
        raises(dist.DistBackendError, work.wait, "aborted")
    dist.barrier()  # the other one is there until then


def raising(group, rank):
    def fails(_):
        raise KeyError("mine")

    work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    raises(Exception, work.get_future().then(fails).wait, "mine")
    work.wait()


def sums(dtype=torch.float32, count=4):
    return lambda group: dist.all_reduce(torch.ones(count, dtype=dtype), group=group)


CALLING = {
    "other counts": lambda *who: differ(*who, (sums(), sums(count=5))),
    "other types": lambda *who: differ(*who, (sums(torch.int32), sums())),
    "other calls": lambda *who: differ(*who, (lambda group: dist.barrier(group), sums())),
    "other roots": lambda *who: differ(*who, [lambda group, root=root: [dist.broadcast(torch.ones(4), root, group=group), dist.barrier(group)]
                                              for root in (0, 1)]),  # a root waits for no rank
    "destroyed with work in flight": in_flight,
    "aborted": aborted,
    "a callback that raises": raising,
}


def held():
    gc.collect()
    with open("/proc/self/maps") as maps:
        shared = sum("rw-s" in line or "r--s" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), shared


@at_ranks(2)
# Promise(torch): a group that is destroyed leaves no descriptor and no thread | after calls and futures, and after what fails
# Promise(torch): Wrong calls raise at every rank, other groups go on, and no descriptor, thread or shared mapping stays | a table, each
#   row eight times beside a group of Gloo
def test_calling(rank, size):
    other = dist.new_group(backend="gloo")  # two backends in one process
    for what, wrong in CALLING.items():
        def once():
            group = dist.new_group(timeout=WITHIN)
            wrong(group, rank)
            dist.destroy_process_group(group)
            for one in (None, other):  # nothing else notices
                tensor = torch.ones(2)
                dist.all_reduce(tensor, group=one)
                assert tensor.tolist() == [size] * 2, (what, tensor)

        for _ in range(3):
            once()
        before = held()
        for _ in range(5):
            once()
        until(lambda: all(now <= then for now, then in zip(held(), before)), lambda: f"{what}: before {before}, now {held()}")
        dist.barrier(other)


@at_ranks(2)
def test_ranks_that_do_not_come_to_a_part(rank, size):
    if rank == 0:
        within = datetime.timedelta(milliseconds=300)
        raises(dist.DistBackendError, lambda: dist.new_group(timeout=within), "rank 1", "in 0.3 s")
    dist.barrier()


if __name__ == "__main__":
    ranks.main(globals())
