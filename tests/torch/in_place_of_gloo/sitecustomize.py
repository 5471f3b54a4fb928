"""For programs that take Gloo by name, with this folder in PYTHONPATH: in this process and what it starts, in memory, Baton stands
for Gloo. Of vLLM, the memory that its ranks of one machine use instead of their group is turned off, as it is where they are on
several; with OVER=gloo that alone."""
import datetime
import importlib.abc
import importlib.machinery
import os
import re
import sys


def torch_distributed(dist):
    if not dist.is_available():
        return
    begin, new = dist.init_process_group, dist.new_group

    def named(backend):
        # "gloo" or "cpu:gloo", and no name that has it as a part.
        return re.sub(r"(?<![\w-])gloo\b(?!:)", "baton", backend) if isinstance(backend, str) else backend

    def init_process_group(backend=None, *rest, **how):
        import baton.torch  # noqa: F401

        return begin(named(backend), *rest, **how)

    def new_group(ranks=None, timeout=None, backend=None, *rest, **how):
        return new(ranks, timeout, named(backend), *rest, **how)

    def backend_of_gloo(store, rank, size, timeout=datetime.timedelta(minutes=30)):
        import baton.torch

        options = type("Options", (), {"store": store, "group_rank": rank, "group_size": size, "timeout": timeout,
                                       "group_id": "in place of Gloo", "enable_reconfigure": False})
        return baton.torch._make(options, None)

    for module in (dist, dist.distributed_c10d):
        module.init_process_group, module.new_group, module.ProcessGroupGloo = init_process_group, new_group, backend_of_gloo


def vllm_communicator(module):
    module.CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


CHANGES = {"torch.distributed": torch_distributed, "vllm.distributed.device_communicators.cpu_communicator": vllm_communicator}
if os.environ.get("OVER") == "gloo":
    del CHANGES["torch.distributed"]


class AfterImport(importlib.abc.MetaPathFinder):
    """Most processes import neither."""

    def find_spec(self, name, path, target=None):
        change = CHANGES.pop(name, None)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, AfterImport())
