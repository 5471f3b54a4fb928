"""Collectives: all_reduce and its relatives, and point to point, among the ranks of a group.

    with baton.Communicator.from_environment() as comm:   # under torchrun, mpirun, srun, baton launch
        comm.all_reduce(gradients)                        # a numpy array, a torch tensor: in place
        work = comm.all_gather_async(mine)                # ... compute ...
        parts = work.wait()                               # or: await work

Every rank makes the same calls in the same order; sends and receives are matched between two ranks alone. Arrays are numpy's,
torch's (of the host or of a CUDA device), or anything that has DLPack or the buffer protocol. They must be contiguous, and stay
untouched until the call has ended. Sums and the like take float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2, int8, int32,
int64, uint8, uint32, uint64 and bool; calls that only move elements take any type.

`op` is "sum", "prod", "min", "max", "avg", "premulsum" (the sum of what each rank multiplied by its own `factor`), or of bits "and",
"or" and "xor".

Calls return their output. all_reduce, broadcast and reduce work in place where no `out` is given; the others make an array like
the input. Wrong arguments raise InvalidParamError, and the call does not begin. A rank that died or does not answer raises
RemoteDisconnectError; a call that was aborted, or whose time ran out, CancelledError: the text names the rank, the call and its
sequence number. From then on the communicator raises that at every call, and shrink() makes one of the ranks that are left.

Calls may come from any thread, and free the interpreter's lock. Without `background` calls advance while some thread waits for one, tests one, or awaits one.
"""
from __future__ import annotations

import array
import asyncio
import contextlib
import ctypes
import itertools
import sys
import threading
import weakref
from typing import Any, Callable, Coroutine, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from . import _library, _loop
from ._handle import Handle
from ._library import call, lib, take
from .agent import _in_slices, _settings, _text, _within
from .buffers import Elements, elements_of
from .errors import BatonError, BatonTimeoutError, InvalidParamError, error_of

_KINDS = {name: number for number, name in enumerate((
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "barrier", "send", "receive",
    "all_to_all_v", "scatter", "gather", "all_gather_v", "reduce_scatter_v"))}
_TYPES = {name: number for number, name in enumerate((
    "float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64", "float8_e4m3fn", "float8_e5m2", "uint32",
    "uint64", "bool"))}
_OPS = {name: number for number, name in enumerate((
    "sum", "prod", "min", "max", "avg", "premulsum", "and", "or", "xor"))}
_REDUCES = {"all_reduce", "reduce_scatter", "reduce", "reduce_scatter_v"}
ANY_RANK = -1  # as the source of a receive
_BYTE = _TYPES["uint8"]
_ORDERED, _UNORDERED = 1, 2
_SPINS, _NAP = 20, 0.01  # of a task that awaits a call: looks, before it sleeps, and for how many seconds at most
_KEPT, _MOST = 64, 240  # calls in flight, before those that have ended are looked for, and of all ranks' calls before the oldest is waited for

OnEnd = Callable[["Work", Optional[BatonError]], None]
_awaited: Dict[int, Tuple["Work", OnEnd]] = {}  # whose end the library tells by _told()
_keys = itertools.count(1)


def _told(key: int, number: int, result: int, text: bytes) -> None:
    """On whichever thread finds out that a call has ended."""
    work, on_end = _awaited.pop(key)
    # What it raises has no caller to go to: ctypes hands it to sys.unraisablehook.
    on_end(work, error_of(result, text.decode(errors="replace")) if result < 0 else None)


_TOLD = _library.OnEnd(_told)


class Work(_loop.Awaited[Any]):
    """A call that was started. `await work`, asyncio.create_task(work) and the like end as it does; a cancelled wait
    changes nothing."""

    def __init__(self, comm: "Communicator", name: str, keep: Any, result: Any) -> None:
        self.comm, self.name, self.number = comm, name, 0
        self._keep, self._result = keep, result
        self._error: Optional[BatonError] = None
        self._ended, self._lock = False, threading.Lock()

    def __repr__(self) -> str:
        state = "runs" if not self._ended else f"failed: {self._error}" if self._error else "done"
        return f"<{self.name} of {self.comm.name!r}: {state}>"

    def _end(self, error: Optional[BatonError]) -> None:
        self._error, self._ended, self._keep = error, True, None
        self.comm._running.pop(self.number, None)

    def _ask(self, function: Any, *arguments: Any) -> bool:
        """Whether it has ended, after one of the library's functions for that."""
        try:
            if self.comm._open.call(function, self.number, *arguments) != _library.IN_PROGRESS:
                self._end(None)
        except BatonTimeoutError:
            raise
        except BatonError as why:
            self._end(why)
        return self._ended

    def _tell(self) -> Any:
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._result

    def done(self) -> bool:
        """False while it runs. Raises its error, if it failed."""
        if not self._ended and self._lock.acquire(blocking=False):  # else another thread waits for it
            try:
                if not self._ended:
                    self._ask(lib.work_test)
            finally:
                self._lock.release()
        if self._ended:
            self._tell()
        return self._ended

    def wait(self, timeout: Optional[float] = None) -> Any:
        """Waits for its end; returns what the call returns, or raises its error. BatonTimeoutError: it still runs. Any thread
        may wait, any number of times."""
        if not self._ended:
            _in_slices(self._wait_slice, timeout)
        return self._tell()

    def _wait_slice(self, span: int) -> None:
        if not self._lock.acquire(timeout=span / 1e9):
            raise BatonTimeoutError(f"{self.name} still runs")
        try:
            if not self._ended:
                self._ask(lib.work_wait, span)
        finally:
            self._lock.release()

    @property
    def source(self) -> int:
        """Of a receive that has ended: from which rank. NotFoundError: of anything else, or of one that 1,024 calls came after."""
        rank = ctypes.c_int32()
        self.comm._open.call(lib.work_source, self.number, ctypes.byref(rank))
        return rank.value

    @property
    def result(self) -> Any:
        """What the call returns, once it has ended; InvalidParamError while it runs."""
        if not self.done():
            raise InvalidParamError(f"{self.name} still runs: wait() for it")
        return self._result

    async def _wait(self) -> Any:
        # With a background thread, a callback for each call would wait for the interpreter's lock: to look now and then costs
        # less. Without one looking is what advances it; soon it sleeps, and other tasks run, until there is something to do.
        pause, turns = 0.0, 0
        while not self.done():
            turns += 1
            if self.comm._background:
                await asyncio.sleep(pause)
                pause = min(pause + 20e-6, 1e-3)
            elif turns < _SPINS or self.comm.endpoint.progress():
                await asyncio.sleep(0)
            else:
                await _loop.readable(self.comm.endpoint.event_fd, _NAP)
        return self._tell()

    def close(self) -> None:
        """Nothing: under a coroutine's name for it."""


class _EndpointHandle(Handle):
    """The library's endpoint, which is there as long as memory of it is used, though it was closed."""

    def __init__(self, value: Optional[int] = None) -> None:
        super().__init__(value, "endpoint")
        self._memory: Set[int] = set()  # addresses
        self._later: Optional[int] = None  # the endpoint that was closed, and is still needed

    def destroy(self) -> None:
        with self._destroying:
            if self.value and self._memory:
                self._later, self.value = self.value, None
            else:
                super().destroy()

    def allocate(self, size: int) -> int:
        out = ctypes.c_void_p()
        self.call(lib.endpoint_allocate, size, ctypes.byref(out))
        self._memory.add(out.value or 0)
        return out.value or 0

    def free(self, address: int) -> None:
        with self._destroying:
            value = self.value or self._later
            self._memory.discard(address)
            if value:
                lib.endpoint_free(value, address, None)
            if self._later and not self._memory:
                value, self._later = self._later, None
                lib.endpoint_close(value)

    def _forget(self) -> None:
        super()._forget()
        self._later = None


class Endpoint:
    """What communicators of a process share: connections, memory, a thread. `background`: that thread advances calls while the
    program computes, which costs a call that is waited for at once some microseconds. `pool_bytes`: memory that peers reach is
    taken from the system in pieces of so much; 0: the default. The others are as for an Agent."""

    def __init__(self, *, providers: Optional[List[str]] = None, require: str = "", key_file: str = "", listen_host: str = "",
                 listen_port: int = 0, background: bool = False, settings: Optional[Mapping[str, Any]] = None,
                 advertise: str = "", pool_bytes: int = 0) -> None:
        self._open, self.background = _EndpointHandle(), background
        options = _library.EndpointOptions()
        lib.endpoint_options_init(ctypes.byref(options), ctypes.sizeof(options))
        options.providers = _text(",".join(providers or []), "providers") or None
        options.require = _text(require, "require") or None
        options.key_file = _text(key_file, "key_file") or None
        options.listen_host = _text(listen_host, "listen_host") or None
        options.listen_port = _within(listen_port, 2 ** 16 - 1, "listen_port")
        options.background, options.pool_bytes = background, _within(pool_bytes, 2 ** 64 - 1, "pool_bytes")
        options.settings = _settings(settings or {}) or None
        options.advertise = _text(advertise, "advertise") or None
        handle = ctypes.c_void_p()
        call(lib.endpoint_open, ctypes.byref(options), ctypes.byref(handle))
        self._open.value = handle.value
        weakref.finalize(self, self._open.destroy)

    @property
    def handle(self) -> bytes:
        """The identity and address of this process, for others to make communicators with: 96 bytes, without a secret in them."""
        out = (ctypes.c_uint8 * 96)()
        self._open.call(lib.endpoint_handle, out)
        return bytes(out)

    def allocate(self, size: int) -> "ctypes.Array[ctypes.c_char]":
        """`size` bytes, zeros: a buffer (numpy.frombuffer() makes an array of it) that calls need not copy on its way. It
        stays until nothing refers to it any more, also behind close()."""
        address = self._open.allocate(_within(size, 2 ** 63 - 1, "size"))
        memory = (ctypes.c_char * size).from_address(address)
        weakref.finalize(memory, self._open.free, address)
        return memory

    @property
    def event_fd(self) -> int:
        """Readable when there is something to do, once progress() has returned False; not to be read."""
        return self._open.ask(lib.endpoint_event_fd)

    def progress(self) -> bool:
        """Advances all its communicators by a bounded amount. Returns whether anything happened: if not, a loop of the
        program's own may sleep on the event_fd, some milliseconds at most."""
        return bool(self._open.ask(lib.endpoint_progress))

    def close(self) -> None:
        """Its communicators go on until they are closed."""
        self._open.destroy()

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Rendezvous:
    """Where ranks meet: one of them, or the launcher, opens it and tells the others its `address`. `listen`:
    "HOST:PORT"; "": a free port of loopback; "*": one of every interface. `ranks`: how many come; 0: as many as the first one says."""

    def __init__(self, ranks: int = 0, listen: str = "", key_file: str = "") -> None:
        self._open = Handle(None, "rendezvous")
        handle, address = ctypes.c_void_p(), _library.Bytes()
        call(lib.rendezvous_open, _text(listen, "listen"), _within(ranks, 2 ** 32 - 1, "ranks"),
             _text(key_file, "key_file"), ctypes.byref(handle), ctypes.byref(address))
        self._open.value, self.address = handle.value, take(address).decode()
        weakref.finalize(self, self._open.destroy)

    def close(self) -> None:
        """When all ranks have met, or no more will."""
        self._open.destroy()

    def __enter__(self) -> "Rendezvous":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Place(NamedTuple):
    """Where this process stands in its group."""

    rank: int
    ranks: int
    rendezvous: str
    local_rank: int
    local_ranks: int
    generation: int
    serves: bool


def place_from_environment() -> Place:
    """What the launcher says: torchrun, Open MPI, MPICH, Intel MPI, Slurm, `baton launch`, or BATON_RANK, BATON_RANKS and
    BATON_RENDEZVOUS. NotFoundError: no launcher started this process."""
    out, rendezvous = _library.Place(ctypes.sizeof(_library.Place)), _library.Bytes()
    call(lib.place_from_environment, ctypes.byref(out), ctypes.byref(rendezvous))
    where = take(rendezvous).decode()
    return Place(out.rank, out.ranks, where, out.local_rank, out.local_ranks, out.generation, bool(out.serves))


def _nanoseconds(timeout: Optional[float], what: str) -> int:
    """As the library takes it: 0 is the default, -1 for ever."""
    if timeout is None:
        return 0
    if timeout == float("inf"):
        return -1
    if not 0 < timeout < 9e9:
        raise InvalidParamError(f"{what} is {timeout!r}: it is in seconds, more than 0; float('inf') is for ever")
    return max(int(timeout * 1e9), 1)


def _in_word(number: int, what: str) -> int:
    """As _within(), of a signed place of 32 bits."""
    if not -2 ** 31 <= number < 2 ** 31:
        raise InvalidParamError(f"{what} is {number}: it has 32 bits, one for the sign")
    return number


def _comm_options(name: str, uuid: int, start_timeout: Optional[float], timeout: Optional[float], ordered: bool,
                  tune: bool) -> _library.CommOptions:
    options = _library.CommOptions()
    lib.comm_options_init(ctypes.byref(options), ctypes.sizeof(options))
    options.name, options.uuid = _text(name, "name"), _within(uuid, 2 ** 64 - 1, "uuid")
    options.start_timeout = _nanoseconds(start_timeout, "start_timeout")
    options.timeout = _nanoseconds(timeout, "timeout")
    options.ordered, options.tune = ordered, tune
    return options


def _row(handles: Sequence[bytes]) -> Tuple[bytes, int]:
    for one in handles:
        if not isinstance(one, bytes) or len(one) != 96:
            raise InvalidParamError(f"{one!r} is no handle: pass the 96 bytes that Endpoint.handle is")
    return b"".join(handles), len(handles)


class Communicator:
    """This process as rank `rank` of `ranks`, which meet at `rendezvous`, "HOST:PORT" (Rendezvous): returns when all are there.
    BatonTimeoutError names the ranks that did not come within `start_timeout` seconds. `timeout`: of each call, in seconds, 60 by default;
    float("inf"): none. `ordered`: sums have the same bits whatever algorithm, chunk size and provider. `tune`: the first calls
    of each size try what is fastest. `serves`: this rank serves the rendezvous. `endpoint`: shared with other communicators."""

    def __init__(self, rank: int, ranks: int, rendezvous: str = "", *, endpoint: Optional[Endpoint] = None, name: str = "world",
                 generation: int = 0, serves: bool = False, start_timeout: Optional[float] = None,
                 timeout: Optional[float] = None, ordered: bool = False, tune: bool = True) -> None:
        place = _library.Place(ctypes.sizeof(_library.Place))
        place.rendezvous = _text(rendezvous, "rendezvous") or None
        place.rank = _within(rank, 2 ** 31 - 1, "rank")
        place.ranks = _within(ranks, 2 ** 31 - 1, "ranks")
        place.generation, place.serves = _within(generation, 2 ** 64 - 1, "generation"), serves
        options = _comm_options(name, 0, start_timeout, timeout, ordered, tune)
        handle = ctypes.c_void_p()
        meet = endpoint._open.call if endpoint else lambda function, *arguments: call(function, None, *arguments)
        meet(lib.comm_meet, ctypes.byref(place), ctypes.byref(options), ctypes.byref(handle))
        self._take(handle, name, endpoint, endpoint is not None and endpoint.background)

    def _take(self, handle: ctypes.c_void_p, name: str, endpoint: Optional[Endpoint], background: bool) -> "Communicator":
        self._open = Handle(handle.value, "communicator")
        self.name, self._endpoint, self._background = name, endpoint, background
        self._running: Dict[int, Work] = {}  # what is in flight, with the memory that it uses
        self._most = _KEPT  # of those, before _make_room()
        self._count_ranks()
        weakref.finalize(self, self._open.destroy)
        return self

    def _count_ranks(self) -> None:
        self.rank: int = self._open.ask(lib.comm_rank)
        self.ranks: int = self._open.ask(lib.comm_ranks)

    @classmethod
    def from_handles(cls, endpoint: Endpoint, handles: Sequence[bytes], uuid: int, *, name: str = "group",
                     start_timeout: Optional[float] = None, timeout: Optional[float] = None, ordered: bool = False,
                     tune: bool = True) -> "Communicator":
        """The group of the processes that have these handles, in the order of ranks, one of which is the endpoint's. `uuid`:
        the same number at every rank, not 0, never used before. Returns at once; calls may be started, and wait until the
        ranks that they need are there."""
        options = _comm_options(name, uuid, start_timeout, timeout, ordered, tune)
        handle = ctypes.c_void_p()
        endpoint._open.call(lib.comm_create, *_row(handles), ctypes.byref(options), ctypes.byref(handle))
        return cls.__new__(cls)._take(handle, name, endpoint, endpoint.background)

    @property
    def endpoint(self) -> Endpoint:
        """What it shares with other communicators of this process."""
        if self._endpoint is None:
            handle = ctypes.c_void_p()
            self._open.call(lib.comm_endpoint, ctypes.byref(handle))
            self._endpoint = Endpoint.__new__(Endpoint)
            self._endpoint._open, self._endpoint.background = _EndpointHandle(handle.value), self._background
            weakref.finalize(self._endpoint, self._endpoint._open.destroy)
        return self._endpoint

    def split(self, color: int, key: int = 0, *, name: str = "group", start_timeout: Optional[float] = None,
              timeout: Optional[float] = None, ordered: bool = False, tune: bool = True) -> Optional["Communicator"]:
        """A call of all ranks: those with the same color make a group of their own, ordered by key and then by rank; None for
        a color below 0. Connections are shared."""
        options = _comm_options(name, 0, start_timeout, timeout, ordered, tune)
        handle = ctypes.c_void_p()
        self._open.call(lib.comm_split, _in_word(color, "color"), _in_word(key, "key"), ctypes.byref(options), ctypes.byref(handle))
        return self._part(handle, name) if handle.value else None

    def subgroup(self, ranks: Sequence[int], *, name: str = "group", start_timeout: Optional[float] = None,
                 timeout: Optional[float] = None, ordered: bool = False, tune: bool = True) -> "Communicator":
        """The group of these ranks, in this order; a call of its members alone."""
        options = _comm_options(name, 0, start_timeout, timeout, ordered, tune)
        handle, row = ctypes.c_void_p(), (ctypes.c_int32 * len(ranks))(*[_in_word(rank, "rank") for rank in ranks])
        self._open.call(lib.comm_subgroup, row, len(ranks), ctypes.byref(options), ctypes.byref(handle))
        return self._part(handle, name)

    def _part(self, handle: ctypes.c_void_p, name: str) -> "Communicator":
        return Communicator.__new__(Communicator)._take(handle, name, self._endpoint, self._background)

    def handles(self) -> List[bytes]:
        """Those of its ranks, in their order."""
        out, count = (ctypes.c_uint8 * 96 * self.ranks)(), ctypes.c_size_t()
        self._open.call(lib.comm_handles, out, self.ranks, ctypes.byref(count))
        return [bytes(one) for one in out]

    def reconfigure(self, handles: Sequence[bytes], uuid: int, timeout: Optional[float] = None) -> Work:
        """Other members in place of the present ones, also after a failure or abort(): fewer, more, or all new. Those that come anew
        are made with from_handles(). `rank` and `ranks` are the new ones at once; the Work ends when all are there."""
        number = ctypes.c_uint64()
        self._open.call(lib.comm_reconfigure, *_row(handles), _within(uuid, 2 ** 64 - 1, "uuid"),
                        _nanoseconds(timeout, "timeout") or -1, ctypes.byref(number))
        self._count_ranks()
        work = Work(self, "reconfigure", None, None)
        work.number = number.value
        self._running[work.number] = work
        return work

    def ready(self) -> bool:
        """Whether all ranks are there. Raises what broke the communicator, if something did."""
        return self._open.call(lib.comm_state) != _library.IN_PROGRESS

    def wait_ready(self, timeout: Optional[float] = None) -> None:
        """Waits until all ranks are there. BatonTimeoutError: they are not yet."""
        _in_slices(self._open.call, timeout, lib.comm_wait_ready)

    @classmethod
    def from_environment(cls, **options: Any) -> "Communicator":
        """As place_from_environment() says; `options` are the constructor's."""
        place = place_from_environment()
        return cls(place.rank, place.ranks, place.rendezvous, generation=place.generation, serves=place.serves, **options)

    def close(self) -> None:
        """Leaves the group. Calls in flight end, and threads that wait for one are told that the communicator is closed; nothing
        touches their memory afterwards."""
        self._open.destroy()
        self._running.clear()

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<baton.Communicator {self.name!r}: rank {self.rank} of {self.ranks}>"

    # --- calls. Each has a form that returns a Work at once. `how`: `timeout`, in seconds, and `ordered`, for this call;
    # `on_end`, called with the Work and its error or None by the thread that finds out that it has ended: it must not wait

    def all_reduce_async(self, data: Any, out: Any = None, op: str = "sum", **how: Any) -> Work:
        """Starts all_reduce()."""
        return self._start("all_reduce", data, data if out is None else out, op=op, **how)

    def all_reduce(self, data: Any, out: Any = None, op: str = "sum", **how: Any) -> Any:
        """Every rank gets the sum, product, minimum, maximum or average ("sum", "prod", "min", "max", "avg") of all ranks'
        `data`, element by element. Without `out`: in place."""
        return self.all_reduce_async(data, out, op, **how).wait()

    def reduce_scatter_async(self, data: Any, out: Any = None, op: str = "sum", **how: Any) -> Work:
        """Starts reduce_scatter()."""
        return self._start("reduce_scatter", data, self._part_of(data) if out is None else out, 1, 0, op=op, **how)

    def reduce_scatter(self, data: Any, out: Any = None, op: str = "sum", **how: Any) -> Any:
        """Rank r gets part r of the sum of all ranks' `data`, which has as many parts as there are ranks."""
        return self.reduce_scatter_async(data, out, op, **how).wait()

    def all_gather_async(self, data: Any, out: Any = None, **how: Any) -> Work:
        """Starts all_gather()."""
        return self._start("all_gather", data, self._all_of(data) if out is None else out, 0, 1, **how)

    def all_gather(self, data: Any, out: Any = None, **how: Any) -> Any:
        """Every rank gets all ranks' `data`, in the order of ranks: without `out`, an array with one more dimension."""
        return self.all_gather_async(data, out, **how).wait()

    def broadcast_async(self, data: Any, root: int = 0, **how: Any) -> Work:
        """Starts broadcast()."""
        return self._start("broadcast", data, data, peer=root, writes=self.rank != root, **how)

    def broadcast(self, data: Any, root: int = 0, **how: Any) -> Any:
        """Every rank's `data` becomes what the root's is."""
        return self.broadcast_async(data, root, **how).wait()

    def reduce_async(self, data: Any, out: Any = None, op: str = "sum", root: int = 0, **how: Any) -> Work:
        """Starts reduce()."""
        return self._start("reduce", data, (data if out is None else out) if self.rank == root else None, peer=root, op=op,
                           **how)

    def reduce(self, data: Any, out: Any = None, op: str = "sum", root: int = 0, **how: Any) -> Any:
        """The root gets the sum, or what else `op` says, of all ranks' `data`; the others None. Without `out`: in place."""
        return self.reduce_async(data, out, op, root, **how).wait()

    def scatter_async(self, data: Any = None, out: Any = None, root: int = 0, **how: Any) -> Work:
        """Starts scatter()."""
        if self.rank == root and out is None:
            out = self._part_of(data)
        elif out is None:
            raise InvalidParamError("scatter: pass `out`: only the root knows what it sends")
        return self._start("scatter", data if self.rank == root else None, out, 1, 0, peer=root, **how)

    def scatter(self, data: Any = None, out: Any = None, root: int = 0, **how: Any) -> Any:
        """Rank r gets part r of the root's `data` into `out`, which only the root may leave out."""
        return self.scatter_async(data, out, root, **how).wait()

    def gather_async(self, data: Any, out: Any = None, root: int = 0, **how: Any) -> Work:
        """Starts gather()."""
        if self.rank == root and out is None:
            out = self._all_of(data)
        return self._start("gather", data, out if self.rank == root else None, 0, 1, peer=root, **how)

    def gather(self, data: Any, out: Any = None, root: int = 0, **how: Any) -> Any:
        """The root gets all ranks' `data`, in the order of ranks; the others None."""
        return self.gather_async(data, out, root, **how).wait()

    def all_gather_v_async(self, data: Any, counts: Sequence[int], out: Any, offsets: Optional[Sequence[int]] = None,
                           **how: Any) -> Work:
        """Starts all_gather_v()."""
        return self._start("all_gather_v", data, out, out_list=self._list(out, counts, offsets, "receive"), mine=data, **how)

    def all_gather_v(self, data: Any, counts: Sequence[int], out: Any, offsets: Optional[Sequence[int]] = None,
                     **how: Any) -> Any:
        """all_gather() of parts of any size: rank r has counts[r] elements, which lie at offsets[r] in `out`; without offsets one
        behind the other."""
        return self.all_gather_v_async(data, counts, out, offsets, **how).wait()

    def reduce_scatter_v_async(self, data: Any, counts: Sequence[int], out: Any, op: str = "sum",
                               offsets: Optional[Sequence[int]] = None, **how: Any) -> Work:
        """Starts reduce_scatter_v()."""
        return self._start("reduce_scatter_v", data, out, op=op, in_list=self._list(data, counts, offsets, "send"), mine=out,
                           **how)

    def reduce_scatter_v(self, data: Any, counts: Sequence[int], out: Any, op: str = "sum",
                         offsets: Optional[Sequence[int]] = None, **how: Any) -> Any:
        """reduce_scatter() of parts of any size: rank r gets the sum of counts[r] elements at offsets[r] of all ranks' `data`."""
        return self.reduce_scatter_v_async(data, counts, out, op, offsets, **how).wait()

    def all_to_all_async(self, data: Any, out: Any = None, **how: Any) -> Work:
        """Starts all_to_all()."""
        return self._start("all_to_all", data, _like(data, data.shape) if out is None else out, 1, 1, **how)

    def all_to_all(self, data: Any, out: Any = None, **how: Any) -> Any:
        """Part r of `data` goes to rank r, and part r of what is returned came from rank r."""
        return self.all_to_all_async(data, out, **how).wait()

    def all_to_all_v_async(self, data: Any, send_counts: Sequence[int], out: Any, receive_counts: Sequence[int],
                           send_offsets: Optional[Sequence[int]] = None, receive_offsets: Optional[Sequence[int]] = None,
                           **how: Any) -> Work:
        """Starts all_to_all_v()."""
        return self._start("all_to_all_v", data, out, in_list=self._list(data, send_counts, send_offsets, "send"),
                           out_list=self._list(out, receive_counts, receive_offsets, "receive"), **how)

    def all_to_all_v(self, data: Any, send_counts: Sequence[int], out: Any, receive_counts: Sequence[int],
                     send_offsets: Optional[Sequence[int]] = None, receive_offsets: Optional[Sequence[int]] = None,
                     **how: Any) -> Any:
        """The same with parts of any size: send_counts[r] elements go to rank r, receive_counts[r] come from it. Without
        offsets the parts lie one behind the other."""
        return self.all_to_all_v_async(data, send_counts, out, receive_counts, send_offsets, receive_offsets, **how).wait()

    def send_async(self, data: Any, to: int, tag: int = 0, **how: Any) -> Work:
        """Starts send()."""
        return self._start("send", data, None, peer=to, tag=tag, **how)

    def send(self, data: Any, to: int, tag: int = 0, **how: Any) -> None:
        """Sends to another rank; ends when that one has taken it, in a receive() of the same tag, and of as many elements of the
        same type. Two ranks that both send() first wait for each other: one of them begins with send_async() or
        receive_async()."""
        self.send_async(data, to, tag, **how).wait()

    def receive_async(self, out: Any, source: int = ANY_RANK, tag: int = 0, **how: Any) -> Work:
        """Starts receive(). Its Work.source is the rank from which it came."""
        return self._start("receive", None, out, peer=source, tag=tag, **how)

    def receive(self, out: Any, source: int = ANY_RANK, tag: int = 0, **how: Any) -> Any:
        """Receives into `out` from another rank, or from whichever sends with that tag first."""
        return self.receive_async(out, source, tag, **how).wait()

    def barrier_async(self, **how: Any) -> Work:
        """Starts barrier()."""
        return self._start("barrier", None, None, **how)

    def barrier(self, **how: Any) -> None:
        """Waits until all ranks have come here."""
        self.barrier_async(**how).wait()

    # --- when something goes wrong, and what happens

    def abort(self, why: str = "") -> None:
        """Ends every call here, and at the others, with CancelledError. From any thread; does not wait for other ranks."""
        self._open.call(lib.comm_abort, _text(why, "why"))

    def lost_ranks(self) -> List[int]:
        """The ranks known to be dead or stopped."""
        out, count = (ctypes.c_int32 * self.ranks)(), ctypes.c_size_t()
        self._open.call(lib.comm_lost, out, self.ranks, ctypes.byref(count))
        return list(out[:min(count.value, self.ranks)])

    def shrink(self) -> "Communicator":
        """A new communicator of the ranks that still answer, in their order: a call of all of them, after a failure."""
        handle = ctypes.c_void_p()
        self._open.call(lib.comm_shrink, ctypes.byref(handle))
        return self._part(handle, self.name)

    def explain(self, name: str, size: int) -> str:
        """For people: how a call of that name and size in bytes would run, and what the alternatives would take."""
        if name not in _KINDS:
            raise InvalidParamError(f"{name!r} is no call: there are {', '.join(_KINDS)}")
        return self._said(lib.comm_explain, _KINDS[name], _within(size, 2 ** 64 - 1, "size"))

    def routes(self) -> str:
        """For people: how each other rank is reached."""
        return self._said(lib.comm_routes)

    def flight_record(self) -> str:
        """The last few thousand events, oldest first, one per line."""
        return self._said(lib.comm_flight_record)

    def stats(self) -> Dict[str, int]:
        """Counters."""
        out = _library.CommStats(ctypes.sizeof(_library.CommStats))
        self._open.call(lib.comm_get_stats, ctypes.byref(out))
        return {name: getattr(out, name) for name, *_ in out._fields_[1:]}

    # --- inside

    def _said(self, function: Any, *arguments: Any) -> str:
        out = _library.Bytes()
        self._open.call(function, *arguments, ctypes.byref(out))
        return take(out).decode(errors="replace")

    def _start(self, name: str, data: Any, out: Any, in_parts: int = 0, out_parts: int = 0, *, peer: int = 0, op: str = "sum",
               in_list: Any = None, out_list: Any = None, writes: bool = True, timeout: Optional[float] = None,
               ordered: Optional[bool] = None, on_end: Optional[OnEnd] = None, tag: int = 0, factor: Any = None,
               mine: Any = None) -> Work:
        """`in_parts`, `out_parts`: 1 where there are as many parts of `count` elements as ranks. `mine`: which of the two has one
        part, where the other's are listed."""
        in_place = out is data
        source = None if data is None else elements_of(data, "data", writes and in_place)
        target = source if in_place else None if out is None else elements_of(out, "out", True)
        one = source or target
        if one is None and name != "barrier":
            raise InvalidParamError(f"{name}: pass an array, not None")
        count, kind, scale = 0, _BYTE, 1
        if one is not None:
            if source is not None and target is not None and source.dtype != target.dtype:
                raise InvalidParamError(f"{name}: data is {source.dtype} and out is {target.dtype}: they must be of one type")
            kind, scale = self._type_of(name, one)
            if in_list is None and out_list is None:
                count = self._count(name, source, target, in_parts, out_parts) * scale
            elif mine is not None:
                part, listed = (source if mine is data else target), (in_list or out_list)[0][self.rank]
                if part is not None and part.count != listed:
                    raise InvalidParamError(f"{name}: {'data' if mine is data else 'out'} has {part.count} elements; counts "
                                            f"says {listed} for rank {self.rank}")
        if op not in _OPS:
            raise InvalidParamError(f"{name}: op is {op!r}: it is one of {', '.join(_OPS)}")
        if not (-2 ** 31 <= peer < 2 ** 31 and -2 ** 31 <= tag < 2 ** 31):
            raise InvalidParamError(f"{name}: {peer} is no rank, or {tag} is no tag: they have 32 bits")
        work = Work(self, name, (source, target), out)
        request = _library.Call(
            ctypes.sizeof(_library.Call), _KINDS[name], kind, _OPS[op], peer, source.address if source else None,
            target.address if target else None, count)
        kept: List[Any] = []  # what the request points to
        for which, listed in (("in", in_list), ("out", out_list)) if in_list or out_list else ():
            for field, numbers in zip((f"{which}_counts", f"{which}_offsets"), listed or ()):
                kept.append((ctypes.c_size_t * self.ranks)(*[number * scale for number in numbers]))
                setattr(request, field, ctypes.addressof(kept[-1]))
        request.tag = tag
        if op == "premulsum":
            if factor is None:
                raise InvalidParamError(f"{name}: premulsum needs factor=, a number")
            kept.append(elements_of(_one_like(data, factor), "factor", False))
            request.factor = kept[-1].address
        if ordered is not None:
            request.flags = _ORDERED if ordered else _UNORDERED
        return self._begin(work, request, self._open, lib.comm_start, timeout, on_end)

    def _begin(self, work: Work, request: Any, handle: Handle, function: Any, timeout: Optional[float],
               on_end: Optional[OnEnd]) -> Work:
        """Starts what `request` says, by a function of the library that takes the handle first."""
        if timeout is not None:
            request.timeout = _nanoseconds(timeout, "timeout")
        if on_end is not None:
            request.context = next(_keys)
            request.on_end = _TOLD
            _awaited[request.context] = work, on_end
        if len(self._running) > self._most:
            self._make_room()
        begun = ctypes.c_uint64()
        try:
            handle.call(function, ctypes.byref(request), ctypes.byref(begun))
        except BatonError:
            _awaited.pop(request.context or 0, None)
            raise
        work.number = begun.value
        self._running[work.number] = work
        return work

    def _make_room(self) -> None:
        """Forgets calls that have ended and that nothing has waited for: the library has room for 256 that all make, and thousands
        of others. A rank that is so far ahead of the others waits for the oldest call that all make."""
        works = list(self._running.values())
        with contextlib.suppress(BatonError):  # its wait() raises it
            for work in works:
                work.done()
        of_all = [work for work in self._running.values() if work.name in _KINDS and work.name not in ("send", "receive")]
        count = len(self._running)
        self._most = max(_KEPT, count + min(count, max(_MOST - len(of_all), 0)))
        if len(of_all) >= _MOST:
            with contextlib.suppress(BatonError):
                of_all[0].wait()

    def _type_of(self, name: str, one: Elements) -> Tuple[int, int]:
        """The library's number of a type, and how many of those an element is."""
        kind = _TYPES.get(one.dtype)
        if kind is not None:
            return kind, 1
        if name in _REDUCES:
            raise InvalidParamError(f"{name}: data is {one.dtype}: it must be one of {', '.join(_TYPES)}")
        return _BYTE, one.itemsize

    def _count(self, name: str, source: Optional[Elements], target: Optional[Elements], in_parts: int, out_parts: int) -> int:
        """Elements of a part: what both say."""
        counts = []
        for which, one, parts in (("data", source, in_parts), ("out", target, out_parts)):
            if one is None:
                continue
            count, rest = divmod(one.count, self.ranks if parts else 1)
            if rest:
                raise InvalidParamError(f"{name}: {which} has {one.count} elements, which are not {self.ranks} equal parts")
            counts.append(count)
        if len(counts) == 2 and counts[0] != counts[1]:
            raise InvalidParamError(f"{name}: data has {source.count if source else 0} elements, and out has "
                                    f"{target.count if target else 0}: with {self.ranks} ranks out must have "
                                    f"{counts[0] * (self.ranks if out_parts else 1)}")
        return counts[0] if counts else 0

    def _list(self, thing: Any, counts: Sequence[int], offsets: Optional[Sequence[int]], what: str) -> Any:
        """Counts and offsets, all of them inside the array."""
        counts = [int(count) for count in counts]
        offsets = [0, *itertools.accumulate(counts)][:-1] if offsets is None else [int(offset) for offset in offsets]
        if len(counts) != self.ranks or len(offsets) != self.ranks:
            raise InvalidParamError(f"{what}_counts and {what}_offsets have {len(counts)} and {len(offsets)} numbers: they "
                                    f"have one for each of {self.ranks} ranks")
        size = elements_of(thing, "the array", False).count
        for rank, (count, offset) in enumerate(zip(counts, offsets)):
            if count < 0 or offset < 0 or offset + count > size:
                raise InvalidParamError(f"{what}: {count} elements from {offset} on for rank {rank} are not inside an array of "
                                        f"{size}")
        return counts, offsets

    def _all_of(self, data: Any) -> Any:
        return _like(data, (self.ranks, *data.shape) if hasattr(data, "shape") else None)

    def _part_of(self, data: Any) -> Any:
        shape = getattr(data, "shape", None)
        if shape is None:
            return _like(data, None)
        if not shape or shape[0] % self.ranks:
            raise InvalidParamError(f"reduce_scatter: data has the shape {tuple(shape)}: the first dimension must be a multiple "
                                    f"of {self.ranks} ranks, or pass `out`")
        return _like(data, (shape[0] // self.ranks, *shape[1:]))


def _like(data: Any, shape: Optional[Tuple[int, ...]]) -> Any:
    """A new array of that shape, of the type of `data`."""
    if shape is not None and hasattr(data, "new_empty"):  # torch
        return data.new_empty(shape)
    if shape is not None and hasattr(data, "__array_interface__"):
        return sys.modules["numpy"].empty(shape, data.dtype)
    raise InvalidParamError(f"pass `out`: there is no new {type(data).__name__} to be made like `data`")


def _one_like(data: Any, number: Any) -> Any:
    """An array of one number, of the type of `data`, on the host."""
    if hasattr(data, "new_full"):  # torch
        return data.new_full((1,), number, device="cpu")
    if hasattr(data, "__array_interface__"):
        one = _like(data, (1,))
        one[0] = number
        return one
    return array.array(memoryview(data).format, [number])
