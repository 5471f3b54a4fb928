"""torch.distributed over Baton.

    import baton.torch
    torch.distributed.init_process_group("baton")             # or "cpu:baton,cuda:nccl"

Moves tensors of the CPU and of CUDA devices: over shared memory between processes of a machine, over TCP or RDMA between machines. The backend is
compiled once for the torch that is there (half a minute; `python3 -m baton.torch` does it ahead); where that cannot be done it
is pure Python, slower, and a warning says why. BATON_TORCH=cpp or =python takes one of them for sure. How it differs from Gloo:
docs/pytorch.md.

`init_process_group(..., pg_options=baton.torch.Options(...))` and new_group() take what a group is to be like.
"""
from __future__ import annotations

import atexit
import collections
import ctypes
import datetime
import hashlib
import os
import threading
import time
import warnings
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from .. import _library
from .._library import call, defaults, lib
from ..endpoint import Endpoint
from ..errors import BatonError, InvalidParamError
from . import _build, _rare

__all__ = ["Options", "implementation", "register"]


class Options(c10d.Backend.Options):
    """The options of a group, to pass as pg_options. `require`: the one provider that may be used ("shm", "tcp",
    "rdma"); `ordered`: sums have the same bits whatever algorithm, chunk size and provider; `tune`: the first calls
    of each size try what is fastest. `require` counts in the first group of a process, whose connections all have."""

    def __init__(self, *, require: str = "", ordered: bool = False, tune: bool = True) -> None:
        super().__init__("baton", datetime.timedelta(minutes=30))
        self.require, self.ordered, self.tune = require, ordered, tune


_NEEDED = (2, 15)  # the version of torch, at least
_BARRIER = 6  # baton_call_kind
_HANDLE = 96  # bytes
_NAMING = 1_000_000_000  # ns after a group's timeout: its own error names who is missing
_chosen: Optional[Any] = None  # the module that makes backends
_endpoint: Optional[Endpoint] = None
_stop = threading.Event()  # of the thread that advances the endpoint
_place = ["", ""]  # where it listens, and the provider that it must use
_met: Set[Tuple[int, int]] = set()  # groups that ranks of this process have met in a store: uuid, rank
_named: Dict[Tuple[bytes, str, int], int] = collections.Counter()  # groups of a name among the members of one: uuid, name, rank
_more: List[Endpoint] = []  # of ranks that are threads of one process, behind the first of a group
_lock = threading.RLock()  # of all these


def implementation() -> str:
    """"cpp" or "python": what this process's groups are made of. Compiles the first, if it has not been."""
    return "python" if _module().__name__.endswith("_python") else "cpp"


def _module() -> Any:
    if _chosen is None:
        with _lock:
            _choose()
    return _chosen


def _choose() -> None:
    global _chosen
    if _chosen is not None:
        return
    wanted = os.environ.get("BATON_TORCH", "")
    if wanted not in ("", "cpp", "python"):
        raise ValueError(f"BATON_TORCH is cpp, python or nothing, not {wanted!r}")
    if wanted != "python":
        try:
            module = _build.load()
            module.does_rare_calls(_rare)
            if torch.version.cuda:
                module.is_cuda("cuda")
            atexit.register(module.stop)
            _chosen = module
            return
        except _build.CannotBuild as why:
            if wanted == "cpp":
                raise
            warnings.warn(f"baton.torch has no compiled backend here: {why}. The one in Python is used, which is slower; "
                          "BATON_TORCH=python takes it without this warning", stacklevel=2)
    from . import _python

    _chosen = _python


def _settings(options: Any) -> Tuple[bool, bool]:
    """`ordered` and `tune`, of pg_options if those are Baton's."""
    return (options.ordered, options.tune) if isinstance(options, Options) else (False, True)


def _is_local(store: Any) -> bool:
    """True if all ranks that use this store are on this machine, as far as the store shows."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", "localhost") in ("localhost", "127.0.0.1", "::1")


def endpoint() -> Endpoint:
    """The state that all groups of this process share."""
    global _endpoint
    with _lock:
        if _endpoint is None:
            made = Endpoint(listen_host=_place[0], require=_place[1])
            _module().use(made._open.value)
            thread = threading.Thread(target=_advance, args=(made, _stop), daemon=True, name="baton progress")
            thread.start()
            atexit.register(thread.join)
            atexit.register(_stop.set)
            _endpoint = made
    return _endpoint


def _endpoint_of(turn: int) -> Endpoint:
    """Of a rank behind which so many of its group are threads of this process as well."""
    with _lock:
        while len(_more) < turn:
            _more.append(Endpoint(listen_host=_place[0], require=_place[1], background=True))
    return _more[turn - 1] if turn else endpoint()


def _advance(of: Endpoint, stop: threading.Event) -> None:
    """While no call waits, peers still want to connect, and to know that this process lives."""
    while not stop.wait(0.01):
        of.progress()


def _join(handles: Sequence[bytes], rank: int, uuid: int, timeout: datetime.timedelta, name: str,
          settings: Tuple[bool, bool]) -> Tuple[int, bytes]:
    """A communicator of the processes that have these handles, once all are there; returns it as a number, for a backend to
    adopt, and its uuid and handles, from which parts are made."""
    mine = next((one for one in (_endpoint, *_more) if one is not None and one.handle == handles[rank]), None)
    if mine is None:
        raise RuntimeError(f"group {name}: this process was forked after init_process_group(), and its groups are its parent's: "
                           "call it in the child, with another store")
    wanted = defaults(_library.CommOptions, lib.comm_options_init)
    within = int(timeout.total_seconds() * 1e9)
    wanted.name, wanted.uuid, wanted.start_timeout, wanted.timeout = name.encode(), uuid, within, within
    wanted.ordered, wanted.tune = settings
    comm = ctypes.c_void_p()
    try:
        mine._open.call(lib.comm_create, b"".join(handles), len(handles), ctypes.byref(wanted), ctypes.byref(comm))
        call(lib.comm_wait_ready, comm, within + _NAMING)
        # Ready is what this rank is. When all are, any may leave again.
        barrier, work = _library.Call(ctypes.sizeof(_library.Call), _BARRIER), ctypes.c_uint64()
        call(lib.comm_start, comm, ctypes.byref(barrier), ctypes.byref(work))
        call(lib.work_wait, comm, work, -1)
    except BaseException as why:
        if comm.value is not None:
            lib.comm_destroy(comm)
        if not isinstance(why, BatonError):
            raise
        raise (ValueError if isinstance(why, InvalidParamError) else dist.DistBackendError)(f"group {name}: {why}") from why
    assert comm.value is not None
    return comm.value, uuid.to_bytes(8, "little") + b"".join(handles)


def _part_of_world(opts: Any) -> Optional[Tuple[List[bytes], int]]:
    """The handles and the uuid of a group whose ranks know each other, because this process's first group is Baton's: nothing
    is left to ask a store."""
    ranks, world = getattr(opts, "global_ranks_in_group", ()), dist.group.WORLD
    members = b""
    for device in world._device_types if ranks and world is not None else ():
        backend = world._get_backend(device)
        while dist.is_gloo_available() and isinstance(backend, c10d._ProcessGroupWrapper):
            backend = backend.wrapped_pg
        members = members or _module().members(backend)
    if not members:
        return None
    uuid, handles = members[:8], [members[at:at + _HANDLE] for at in range(8, len(members), _HANDLE)]
    key = uuid, opts.group_id, opts.group_rank  # a group of several devices makes several of its name
    _named[key] += 1
    return [handles[rank] for rank in ranks], _uuid_of(uuid.hex(), opts.group_id, _named[key])


def _uuid_of(*names: Any) -> int:
    digest = hashlib.sha256("/".join(map(str, names)).encode()).digest()
    return int.from_bytes(digest[:8], "little") | 1


def _meet(store: Any, rank: int, size: int, timeout: datetime.timedelta, name: str) -> Tuple[List[bytes], int]:
    """The handles and the uuid of the ranks that use this store: each leaves its handle there."""
    if size == 1:
        return [endpoint().handle], _new_uuid()
    if rank == 0:
        store.set("uuid", str(_new_uuid()))
    mine = f"{endpoint().handle.hex()} {implementation()} {size}"
    store.set(f"handle/{rank}", mine)
    end = time.monotonic() + timeout.total_seconds()
    keys = ["uuid"] + [f"handle/{other}" for other in range(size)]
    try:
        store.wait(keys[:2], timeout)
        if (int(store.get("uuid")), rank) not in _met:  # where rank 0 speaks of another size, the others may never come
            _check_size(name, rank, size, {0: store.get(keys[1]).decode()})
        store.wait(keys, timeout)
    except RuntimeError as why:  # each store has its own
        came = {other: store.get(key).decode() for other, key in enumerate(keys[1:]) if store.check([key])}
        _check_size(name, rank, size, came)
        missing = [other for other in range(size) if other not in came]
        spoken = f"timeout after {timeout.total_seconds() * 1000:.0f}ms"  # in the words of torch's stores, which programs look for
        raise dist.DistStoreError(f"group {name}: rank {rank} waited for {len(missing)} of {size} ranks, which did not join: "
                                  f"{missing} ({spoken})") from why
    told = [store.get(key).decode() for key in keys]
    while (int(told[0]), rank) in _met:  # of a group before this one, in the same store
        if time.monotonic() > end:
            raise dist.DistStoreError(f"group {name}: rank {rank} waited {timeout} for rank 0 to begin another group in a store "
                                      "that has had one: did it call init_process_group() again?")
        time.sleep(0.005)
        told = [store.get(key).decode() for key in keys]
    _met.add((int(told[0]), rank))
    _check_size(name, rank, size, dict(enumerate(told[1:])))
    if told[1 + rank] != mine:
        raise ValueError(f"group {name}: another process has joined as rank {rank} as well: give each process a rank of its own")
    kinds: Dict[str, List[int]] = {}
    for other, one in enumerate(told[1:]):
        kinds.setdefault(one.split()[1], []).append(other)
    if len(kinds) > 1:
        raise RuntimeError(f"group {name}: ranks {kinds['cpp']} have the compiled backend, and ranks {kinds['python']} the one "
                           "in Python, whose calls differ: set BATON_TORCH=python at all ranks, or let `python3 -m baton.torch` "
                           "say why it could not be compiled at the latter")
    handles = [one.split()[0] for one in told[1:]]
    turns = [handles[:other].count(handle) for other, handle in enumerate(handles)]
    if turns[rank]:
        store.set(f"handle/{rank}/{told[0]}", _endpoint_of(turns[rank]).handle.hex())
    for other in (other for other, turn in enumerate(turns) if turn):
        handles[other] = store.get(f"handle/{other}/{told[0]}").decode()
    return [bytes.fromhex(one) for one in handles], int(told[0])


def _check_size(name: str, rank: int, size: int, told: Dict[int, str]) -> None:
    """Whether these ranks, by what they left in the store, joined a group of as many."""
    for other, one in told.items():
        theirs = int(one.split()[2])
        if theirs != size:
            raise ValueError(f"group {name}: rank {rank} joins a group of {size} ranks, and rank {other} one of {theirs}: pass the "
                             "same world_size at all ranks")


def _new_uuid() -> int:
    return int.from_bytes(os.urandom(8), "little") | 1


def _forget() -> None:
    global _endpoint, _stop, _lock
    _endpoint, _stop, _lock = None, threading.Event(), threading.RLock()  # those are the parent's
    _more.clear()


os.register_at_fork(after_in_child=_forget)


def _check_version(version: str) -> None:
    if tuple(int(part) for part in version.split(".")[:2]) < _NEEDED:
        raise RuntimeError(f"baton.torch needs torch {'.'.join(map(str, _NEEDED))} or newer, and this is {version}: upgrade torch")


def _make(opts: Any, options: Any) -> Any:
    """Makes a new group; torch calls this."""
    _check_version(torch.__version__)  # and not before: `import torch` itself may load this module
    store, rank, size, timeout = opts.store, opts.group_rank, opts.group_size, opts.timeout
    if not isinstance(timeout, datetime.timedelta):
        timeout = datetime.timedelta(seconds=timeout)
    plain = c10d.Backend.Options("baton", timeout)
    plain.group_name = opts.group_id or "world"
    module = _module()
    if opts.enable_reconfigure and module.__name__.endswith("_python"):
        raise RuntimeError("backend baton: only the compiled backend can reconfigure groups; `python3 -m baton.torch` says "
                           "why it could not be compiled")
    if _endpoint is None:
        _place[:] = "" if _is_local(store) else "*", getattr(options, "require", "")
    joined: Tuple[Any, ...] = ()
    if not opts.enable_reconfigure:
        handles, uuid = _part_of_world(opts) or _meet(store, rank, size, timeout, plain.group_name)
        joined = _join(handles, rank, uuid, timeout, plain.group_name, _settings(options))
    backend = module.make(store, rank, size, plain, *_settings(options))
    if joined:
        module.adopt(backend, *joined, rank, size)
    return backend


def register() -> None:
    """Makes the backend known to torch. Importing this module does that."""
    if "BATON" not in dist.Backend._plugins:
        dist.Backend.register_backend("baton", _make, extended_api=True,
                                      devices=["cpu", "cuda"] if torch.version.cuda else ["cpu"])


register()
