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

import contextlib
import contextvars
import ctypes
import weakref
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from . import _library
from ._handle import Closing, Handle
from ._library import call, defaults, lib
from ._requests import KINDS, all_of, like, nanoseconds, part_of, places, request_of
from .agent import _in_slices, _text, _within
from .endpoint import Endpoint, EndpointHandle, place_from_environment
from .errors import BackendError, BatonError, InvalidParamError, NotFoundError
from .work import OnEnd, Work, forget_end, tell_end

ANY_RANK = -1  # as the source of a receive
# Calls in flight, before those that have ended are looked for; and of all ranks, before the oldest is waited for.
_KEPT, _MOST = 64, 240
# Groups that are open in this thread or task, the inner ones behind.
_groups: "contextvars.ContextVar[Tuple[Work, ...]]" = contextvars.ContextVar("baton.groups", default=())


def _in_word(number: int, what: str) -> int:
    """As _within(), of a signed place of 32 bits."""
    if not -2 ** 31 <= number < 2 ** 31:
        raise InvalidParamError(f"{what} is {number}: it has 32 bits, one for the sign")
    return number


def _comm_options(name: str, uuid: int, start_timeout: Optional[float], timeout: Optional[float], ordered: bool,
                  tune: bool) -> _library.CommOptions:
    options: _library.CommOptions = defaults(_library.CommOptions, lib.comm_options_init)
    options.name, options.uuid = _text(name, "name"), _within(uuid, 2 ** 64 - 1, "uuid")
    options.start_timeout = nanoseconds(start_timeout, "start_timeout")
    options.timeout = nanoseconds(timeout, "timeout")
    options.ordered, options.tune = ordered, tune
    return options


def _row(handles: Sequence[bytes]) -> Tuple[bytes, int]:
    for one in handles:
        if not isinstance(one, bytes) or len(one) != 96:
            raise InvalidParamError(f"{one!r} is no handle: pass the 96 bytes that Endpoint.handle is")
    return b"".join(handles), len(handles)


class Communicator(Closing):
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
        self._take(handle.value, name, endpoint, endpoint is not None and endpoint.background)

    def _take(self, handle: Optional[int], name: str, endpoint: Optional[Endpoint], background: bool) -> "Communicator":
        self._open = Handle(handle, "communicator")
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
        handle = endpoint._open.handle_of(lib.comm_create, *_row(handles), ctypes.byref(options))
        return cls.__new__(cls)._take(handle, name, endpoint, endpoint.background)

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint that it shares with other communicators of this process."""
        if self._endpoint is None:
            self._endpoint = Endpoint.__new__(Endpoint)
            self._endpoint._open = EndpointHandle(self._open.handle_of(lib.comm_endpoint))
            self._endpoint.background = self._background
            weakref.finalize(self._endpoint, self._endpoint._open.destroy)
        return self._endpoint

    def split(self, color: int, key: int = 0, *, name: str = "group", start_timeout: Optional[float] = None,
              timeout: Optional[float] = None, ordered: bool = False, tune: bool = True) -> Optional["Communicator"]:
        """A call of all ranks: those with the same color make a group of their own, ordered by key and then by rank; None for
        a color below 0. Connections are shared."""
        options = _comm_options(name, 0, start_timeout, timeout, ordered, tune)
        handle = self._open.handle_of(lib.comm_split, _in_word(color, "color"), _in_word(key, "key"), ctypes.byref(options))
        return self._part(handle, name) if handle else None

    def subgroup(self, ranks: Sequence[int], *, name: str = "group", start_timeout: Optional[float] = None,
                 timeout: Optional[float] = None, ordered: bool = False, tune: bool = True) -> "Communicator":
        """The group of these ranks, in this order; a call of its members alone."""
        options = _comm_options(name, 0, start_timeout, timeout, ordered, tune)
        row = (ctypes.c_int32 * len(ranks))(*[_in_word(rank, "rank") for rank in ranks])
        return self._part(self._open.handle_of(lib.comm_subgroup, row, len(ranks), ctypes.byref(options)), name)

    def _part(self, handle: Optional[int], name: str) -> "Communicator":
        return Communicator.__new__(Communicator)._take(handle, name, self._endpoint, self._background)

    def handles(self) -> List[bytes]:
        """The handles of its ranks, in their order."""
        out, count = (ctypes.c_uint8 * 96 * self.ranks)(), ctypes.c_size_t()
        self._open.call(lib.comm_handles, out, self.ranks, ctypes.byref(count))
        return [bytes(one) for one in out]

    def reconfigure(self, handles: Sequence[bytes], uuid: int, timeout: Optional[float] = None) -> Work:
        """Replaces the members, also after a failure or abort(): fewer, more, or all new. New members join with
        from_handles(). `rank` and `ranks` are the new ones at once; the Work ends when all are there."""
        number = self._open.number_of(lib.comm_reconfigure, *_row(handles), _within(uuid, 2 ** 64 - 1, "uuid"),
                                      nanoseconds(timeout, "timeout") or -1)
        self._count_ranks()
        work = Work(self, "reconfigure", None, None)
        work.number = number
        self._running[work.number] = work
        return work

    def ready(self) -> bool:
        """True if all ranks are connected. If the communicator is broken, raises the reason."""
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

    def __repr__(self) -> str:
        return f"<baton.Communicator {self.name!r}: rank {self.rank} of {self.ranks}>"

    @contextlib.contextmanager
    def group(self) -> Iterator[Work]:
        """Calls that this thread, or asyncio's task, begins inside are waited for as one, by the Work that `with` gives, whose result
        is a list of theirs:

            with comm.group() as both:
                comm.send_async(mine, to=right)
                comm.receive_async(theirs, left)
            both.wait()

        Theirs end with it: none can be waited for before the group has. Accesses to windows are in no group."""
        work = Work(self, "group", [], [])
        work.number, work._collects = self._open.number_of(lib.comm_group_begin), True
        self._running[work.number] = work
        _groups.set((*_groups.get(), work))
        try:
            yield work
        finally:
            _groups.set(tuple(one for one in _groups.get() if one is not work))
            work._collects = False
            self._open.call(lib.comm_group_end, work.number)

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
        return self._start("reduce_scatter", data, part_of(self.ranks, data) if out is None else out, 1, 0, op=op, **how)

    def reduce_scatter(self, data: Any, out: Any = None, op: str = "sum", **how: Any) -> Any:
        """Rank r gets part r of the sum of all ranks' `data`, which has as many parts as there are ranks."""
        return self.reduce_scatter_async(data, out, op, **how).wait()

    def all_gather_async(self, data: Any, out: Any = None, **how: Any) -> Work:
        """Starts all_gather()."""
        return self._start("all_gather", data, all_of(self.ranks, data) if out is None else out, 0, 1, **how)

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
            out = part_of(self.ranks, data)
        elif out is None:
            raise InvalidParamError("scatter: pass `out`: only the root knows what it sends")
        return self._start("scatter", data if self.rank == root else None, out, 1, 0, peer=root, **how)

    def scatter(self, data: Any = None, out: Any = None, root: int = 0, **how: Any) -> Any:
        """Rank r gets part r of the root's `data` into `out`, which only the root may leave out."""
        return self.scatter_async(data, out, root, **how).wait()

    def gather_async(self, data: Any, out: Any = None, root: int = 0, **how: Any) -> Work:
        """Starts gather()."""
        if self.rank == root and out is None:
            out = all_of(self.ranks, data)
        return self._start("gather", data, out if self.rank == root else None, 0, 1, peer=root, **how)

    def gather(self, data: Any, out: Any = None, root: int = 0, **how: Any) -> Any:
        """The root gets all ranks' `data`, in the order of ranks; the others None."""
        return self.gather_async(data, out, root, **how).wait()

    def all_gather_v_async(self, data: Any, counts: Sequence[int], out: Any, offsets: Optional[Sequence[int]] = None,
                           **how: Any) -> Work:
        """Starts all_gather_v()."""
        return self._start("all_gather_v", data, out, out_list=places(self.ranks, out, counts, offsets, "receive"), mine=data, **how)

    def all_gather_v(self, data: Any, counts: Sequence[int], out: Any, offsets: Optional[Sequence[int]] = None,
                     **how: Any) -> Any:
        """all_gather() of parts of any size: rank r has counts[r] elements, which lie at offsets[r] in `out`; without offsets one
        behind the other."""
        return self.all_gather_v_async(data, counts, out, offsets, **how).wait()

    def reduce_scatter_v_async(self, data: Any, counts: Sequence[int], out: Any, op: str = "sum",
                               offsets: Optional[Sequence[int]] = None, **how: Any) -> Work:
        """Starts reduce_scatter_v()."""
        return self._start("reduce_scatter_v", data, out, op=op, in_list=places(self.ranks, data, counts, offsets, "send"), mine=out,
                           **how)

    def reduce_scatter_v(self, data: Any, counts: Sequence[int], out: Any, op: str = "sum",
                         offsets: Optional[Sequence[int]] = None, **how: Any) -> Any:
        """reduce_scatter() of parts of any size: rank r gets the sum of counts[r] elements at offsets[r] of all ranks' `data`."""
        return self.reduce_scatter_v_async(data, counts, out, op, offsets, **how).wait()

    def all_to_all_async(self, data: Any, out: Any = None, **how: Any) -> Work:
        """Starts all_to_all()."""
        return self._start("all_to_all", data, like(data, data.shape) if out is None else out, 1, 1, **how)

    def all_to_all(self, data: Any, out: Any = None, **how: Any) -> Any:
        """Part r of `data` goes to rank r, and part r of what is returned came from rank r."""
        return self.all_to_all_async(data, out, **how).wait()

    def all_to_all_v_async(self, data: Any, send_counts: Sequence[int], out: Any, receive_counts: Sequence[int],
                           send_offsets: Optional[Sequence[int]] = None, receive_offsets: Optional[Sequence[int]] = None,
                           **how: Any) -> Work:
        """Starts all_to_all_v()."""
        return self._start("all_to_all_v", data, out, in_list=places(self.ranks, data, send_counts, send_offsets, "send"),
                           out_list=places(self.ranks, out, receive_counts, receive_offsets, "receive"), **how)

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
        return self._part(self._open.handle_of(lib.comm_shrink), self.name)

    def explain(self, name: str, size: int) -> str:
        """For people: how a call of that name and size in bytes would run, and what the alternatives would take."""
        if name not in KINDS:
            raise InvalidParamError(f"{name!r} is no call: there are {', '.join(KINDS)}")
        return self._said(lib.comm_explain, KINDS[name], _within(size, 2 ** 64 - 1, "size"))

    def routes(self) -> str:
        """For people: how each other rank is reached."""
        return self._said(lib.comm_routes)

    def flight_record(self) -> str:
        """The last few thousand events, oldest first, one per line."""
        return self._said(lib.comm_flight_record)

    def stats(self) -> Dict[str, int]:
        """Counters."""
        return self._open.counters_of(lib.comm_get_stats, _library.CommStats)

    # --- inside

    def _said(self, function: Any, *arguments: Any) -> str:
        return self._open.bytes_of(function, *arguments).decode(errors="replace")

    def _start(self, name: str, data: Any, out: Any, in_parts: int = 0, out_parts: int = 0, *, timeout: Optional[float] = None,
               on_end: Optional[OnEnd] = None, **what: Any) -> Work:
        """The rest is as in request_of()."""
        request, _kept, used = request_of(self.rank, self.ranks, name, data, out, in_parts, out_parts, **what)
        return self._begin(Work(self, name, used, out), request, self._open, lib.comm_start, timeout, on_end)

    def _begin(self, work: Work, request: Any, handle: Handle, function: Any, timeout: Optional[float],
               on_end: Optional[OnEnd]) -> Work:
        """Starts what `request` says, by a function of the library that takes the handle first."""
        if timeout is not None:
            request.timeout = nanoseconds(timeout, "timeout")
        key = tell_end(request, work, on_end) if on_end is not None else 0
        if len(self._running) > self._most:
            self._make_room()
        open_groups = _groups.get() if isinstance(request, _library.Call) else ()
        group = next((one for one in reversed(open_groups) if one.comm is self and one._collects), None)
        begun = ctypes.c_uint64()
        if group is not None:
            request.group = group.number
        try:
            while True:
                try:
                    handle.call(function, ctypes.byref(request), ctypes.byref(begun))
                    break
                except BackendError:  # no room, perhaps: calls in a group make some when they end
                    if group is None or not group._of_all:
                        raise
                    with contextlib.suppress(NotFoundError):  # it has ended, which its group tells
                        _in_slices(self._open.call, None, lib.work_wait, group._of_all.pop(0))
        except BatonError:
            forget_end(key)
            raise
        work.number = begun.value
        if group is not None:
            group._add(work)
        else:
            self._running[work.number] = work
        return work

    def _make_room(self) -> None:
        """Forgets calls that have ended and that nothing has waited for: the library has room for 256 that all make, and thousands
        of others. A rank that is so far ahead of the others waits for the oldest call that all make."""
        works = list(self._running.values())
        with contextlib.suppress(BatonError):  # its wait() raises it
            for work in works:
                work.done()
        of_all = [work for work in self._running.values() if work._is_of_all()]
        count = len(self._running)
        self._most = max(_KEPT, count + min(count, max(_MOST - len(of_all), 0)))
        if len(of_all) >= _MOST:
            with contextlib.suppress(BatonError):
                of_all[0].wait()
