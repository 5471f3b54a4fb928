"""Groups whose members change (torch's enable_reconfigure), as torch's own contracts of fault tolerance describe them. The ranks
meet at a store, by which they exchange handles."""
import datetime
import os
import sys
import tempfile

import torch
import torch.distributed as dist

import ranks
from ranks import raises, run

WITHIN = datetime.timedelta(seconds=30)


class Member:
    """A process with a group that has no members yet."""

    def __init__(self, rank, size, path):
        self.rank, self.size = rank, size
        self.store = dist.FileStore(path, size)
        dist.init_process_group("baton", store=dist.PrefixStore("group", self.store), rank=rank, world_size=size,
                                enable_reconfigure=True, timeout=WITHIN)
        self.group = dist.distributed_c10d._get_default_group()

    def handles(self, members, turn):
        """Those of the members, in this order, which all of them call."""
        self.store.set(f"{turn}/{self.rank}", self.group.get_reconfigure_handle())
        return [self.store.get(f"{turn}/{member}").decode() for member in members]

    def become(self, members, uuid, ordered=True, turn=None):
        handles = self.handles(members, turn or f"{uuid}-{members}")
        dist._reconfigure(uuid, handles if ordered else set(handles), timeout=WITHIN).wait()
        assert self.group.size() == len(members)
        if ordered:
            assert self.group.rank() == members.index(self.rank)

    def sums(self):
        """An all_reduce of ones: how many there are."""
        tensor = torch.ones(5)
        self.group.allreduce([tensor]).wait()
        assert tensor.tolist() == [self.group.size()] * 5

    def meets(self, name):
        """Every process, in the group or not."""
        self.store.set(f"{name}/{self.rank}", "")
        self.store.wait([f"{name}/{other}" for other in range(self.size)], WITHIN)


ALL = [0, 1, 2]


def basic(me):
    me.become(ALL, 1)


def then_all_reduce(me):
    me.become(ALL, 1)
    me.sums()


def then_send_and_receive(me):
    me.become(ALL, 1)
    if me.rank == 0:
        me.group.send([torch.full((3,), 7.0)], 1, 0).wait()
    elif me.rank == 1:
        tensor = torch.zeros(3)
        me.group.recv([tensor], 0, 0).wait()
        assert tensor.tolist() == [7.0] * 3


def shrink_last(me):
    me.become(ALL, 1)
    me.sums()
    if me.rank != 2:
        me.become([0, 1], 2)
        me.sums()
    me.meets("end")


def shrink_middle(me):
    me.become(ALL, 1)
    me.sums()
    if me.rank != 1:
        me.become([0, 2], 2)
        me.sums()
    me.meets("end")


def down_and_up(me):
    me.become(ALL, 1)
    if me.rank != 2:
        me.become([0, 1], 2)
        me.sums()
    me.become(ALL, 3)
    me.sums()


def single_to_all(me):
    me.become([me.rank], 10 + me.rank)
    me.sums()
    me.become(ALL, 20)
    me.sums()


def identity(me):
    for uuid in range(1, 4):
        me.become(ALL, uuid)
        me.sums()


def late_join(me):
    if me.rank != 2:
        me.become([0, 1], 1)
        me.sums()
    me.become(ALL, 2)
    me.sums()


def merge_and_split(me):
    part = [0, 1] if me.rank < 2 else [2]
    me.become(part, 1)
    me.sums()
    me.become(ALL, 2)
    me.sums()
    me.become(part, 3)
    me.sums()


def after_abort(me):
    me.become(ALL, 1)
    me.sums()
    me.group.abort()
    raises(Exception, me.sums)
    me.become(ALL, 2)
    me.sums()


def reused_uuid(me):
    me.become(ALL, 1)
    me.meets("first")
    handles = me.handles(ALL, "again")
    raises(Exception, lambda: dist._reconfigure(1, handles, timeout=WITHIN).wait())


def as_a_set(me):
    me.become(ALL, 1, ordered=False)
    tensor = torch.tensor([float(me.group.rank())])
    me.group.allreduce([tensor]).wait()
    assert tensor.item() == 3
    me.sums()


def one(rank, size, contract, path):
    me = Member(rank, size, path)
    try:
        contract(me)
        me.meets("left")
    finally:
        dist.destroy_process_group()


CONTRACTS = (basic, then_all_reduce, then_send_and_receive, shrink_last, shrink_middle, down_and_up, single_to_all, identity,
             late_join, merge_and_split, after_abort, reused_uuid, as_a_set)


# Promise(torch): the members of a group change, also after abort() | torch's twelve contracts of fault tolerance, at three ranks
def test_contracts():
    failed = []
    for contract in CONTRACTS:
        try:
            with tempfile.TemporaryDirectory() as folder:
                run(one, 3, contract, os.path.join(folder, "store"), backend=None)
            print(f"        {contract.__name__}", flush=True)
        except ranks.Failed as why:
            failed.append(contract.__name__)
            print(f"        {contract.__name__} FAILED: {why}", flush=True)
    assert not failed, f"{len(failed)} of {len(CONTRACTS)}: {failed}"


if __name__ == "__main__":
    if os.environ.get("BATON_TORCH") == "python":
        print("skipped: the backend in Python cannot change the members of a group")
        sys.exit(77)
    ranks.main(globals())
