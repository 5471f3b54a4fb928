"""Operations that are rare enough to run in Python, for both backends (C++ and Python)."""
from __future__ import annotations

import ctypes
import datetime
import time
from typing import Any, List

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from .. import _library
from .._library import call, defaults, lib


def split(backend: Any, store: Any, ranks: List[int], options: Any) -> Any:
    """The backend of a part of the group; None at ranks outside it. Needs no store: the ranks know each other."""
    import baton.torch as here

    if backend.rank() not in ranks:
        return None
    module = here._module()
    settings = module.settings(backend)
    wanted = defaults(_library.CommOptions, lib.comm_options_init)
    wanted.name = (getattr(options, "group_name", "") or "part").encode()
    wanted.start_timeout = wanted.timeout = int(options._timeout.total_seconds() * 1e9)
    wanted.ordered, wanted.tune = settings
    comm = ctypes.c_void_p()
    call(lib.comm_subgroup, module.address(backend), (ctypes.c_int32 * len(ranks))(*ranks), len(ranks), ctypes.byref(wanted),
         ctypes.byref(comm))
    part = module.make(store, ranks.index(backend.rank()), len(ranks), options, *settings)
    module.adopt(part, comm.value, b"", ranks.index(backend.rank()), len(ranks))
    return part


def monitored_barrier(store: Any, rank: int, size: int, turn: int, timeout: datetime.timedelta, all_ranks: bool) -> None:
    """A barrier through the store, which breaks nothing when ranks are missing: rank 0 names them."""
    store = store.clone()  # a store that waits keeps others from using it
    end, spoken = time.monotonic() + timeout.total_seconds(), f"{timeout.total_seconds() * 1000:.0f} ms"
    prefix = f"monitored_barrier/{turn}/"
    if timeout.total_seconds() <= 0:
        raise RuntimeError(f"Rank {rank} timed out in monitoredBarrier after {spoken}: give it more time")
    store.set(f"{prefix}{rank}", "here")

    def came(key: str) -> bool:
        left = max(end - time.monotonic(), 0.001)
        try:
            store.wait([prefix + key], datetime.timedelta(seconds=left))
            return True
        except RuntimeError:  # each store has its own
            return False

    if rank == 0:
        missing = []
        for other in range(1, size):
            if not came(str(other)):
                missing.append(other)
                if not all_ranks:
                    break
        said = (f"[Rank 0]: Rank{'s' if all_ranks else ''} {', '.join(map(str, missing))} failed to pass monitoredBarrier "
                f"in {spoken}")
        store.set(f"{prefix}end", said if missing else "passed")
        if missing:
            raise RuntimeError(said)
        return
    said = store.get(f"{prefix}end").decode() if came("end") else f"rank 0 did not answer in {spoken}"
    if said != "passed":
        raise RuntimeError(f"[Rank {rank}]: Rank {rank} successfully reached monitoredBarrier, but received errors while waiting "
                           f"for send/recv from rank 0: {said}")


def all_reduce_sparse(backend: Any, tensor: torch.Tensor, op: Any) -> None:
    """The sum of all ranks' sparse tensors, in place. Their parts are gathered, padded to the longest one."""
    if op != dist.ReduceOp.SUM:
        raise ValueError("backend baton sums sparse tensors, and has no other reduction of them")
    if tensor.layout != torch.sparse_coo:
        raise ValueError(f"backend baton sums sparse tensors in COO form, and this one is {tensor.layout}")
    mine = tensor.coalesce()
    size = backend.size()
    lengths = torch.empty(size, dtype=torch.int64)
    backend.all_gather_single(lengths, torch.tensor([mine._nnz()]), c10d.AllgatherOptions()).wait()
    longest = int(lengths.max())

    def gathered(part: torch.Tensor) -> List[torch.Tensor]:  # the first dimension is the one that differs
        padded = part.new_zeros((longest, *part.shape[1:]))
        padded[:part.shape[0]] = part
        out = part.new_empty((size, *padded.shape))
        if out.numel():
            backend.all_gather_single(out, padded, c10d.AllgatherOptions()).wait()
        return [out[rank][:length] for rank, length in enumerate(lengths.tolist())]

    indices = torch.cat(gathered(mine.indices().t().contiguous())).t()
    values = torch.cat(gathered(mine.values()))
    total = torch.sparse_coo_tensor(indices, values, tensor.shape).coalesce()
    tensor.sparse_resize_(tensor.shape, tensor.sparse_dim(), tensor.dense_dim())
    tensor.copy_(total)


def reconfigure_handle() -> str:
    import baton.torch as here

    return here.endpoint().handle.hex()


def reconfigure(backend: Any, name: str, uuid: int, handles: List[str], timeout: datetime.timedelta) -> None:
    """Gives a group these members, in this order, instead of those that it has."""
    import baton.torch as here

    mine = reconfigure_handle()
    if mine not in handles:
        raise ValueError(f"reconfigure: this process's handle is not among the {len(handles)} given: see get_reconfigure_handle()")
    module, rank = here._module(), handles.index(mine)
    joined = here._join([bytes.fromhex(handle) for handle in handles], rank, here._uuid_of(name, uuid), timeout, name,
                        module.settings(backend))  # other groups may have the same uuid
    module.adopt(backend, *joined, rank, len(handles))
