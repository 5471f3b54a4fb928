"""A worker's half of all hand-offs, either way: requests and transfers by their names, over a session of the library's."""
from __future__ import annotations

import array
import atexit
import ctypes
import itertools
import json
import logging
import operator
import threading
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

from .. import _library
from .._handle import Handle
from .._library import lib
from ..agent import Agent, _text
from ..errors import InvalidParamError
from .memory import KvMemory, Run

log = logging.getLogger("baton.hand_off")
_SLICE = 0.2  # seconds: how long a wait may keep Ctrl-C waiting


class Shard(NamedTuple):
    """Which worker of its engine this is: rank `rank` of `ranks` in a pipeline's `stage`, of a model with `heads` KV
    heads (1 where all ranks hold the same)."""

    rank: int = 0
    ranks: int = 1
    heads: int = 1
    stage: int = 0


class Order(NamedTuple):
    """What the scheduler wants loaded: a run of this engine's blocks in each group of layers, and which tokens of it
    are wanted. None: nothing; prefill may have its blocks back. Worker k of prefill is agent/k, at the address' port + k;
    `ranks`: its tensor-parallel degree. `sure`: prefill has ended, so it must know of the transfer."""

    request: str
    transfer: str
    agent: str
    address: str
    runs: Optional[List[Run]]
    tokens: List[Tuple[int, int]]
    ranks: int = 1
    sure: bool = False


class Limits(NamedTuple):
    """In seconds: how long prefill may stay silent, how long a load may take in all."""

    silence: float = 1.0
    load: float = 60.0


class Done(NamedTuple):
    """What has ended: requests, those of them that failed, and of each load that did not (bytes, seconds, blocks, seconds
    in which they were read and checked)."""

    requests: Set[str]
    failed: Set[str]
    loads: List[Tuple[int, float, int, float]]


class Sends:
    """Prefill's end."""

    def __init__(self, session: Handle) -> None:
        self._session, self._lock = session, threading.Lock()
        self._numbers: Dict[str, int] = {}           # the library's, of transfers
        self._held: Dict[int, Tuple[str, str]] = {}  # transfer and request
        self._freed: Set[str] = set()                # requests that finished() is to name

    def save(self, transfer: str, layer: int, run: Run) -> None:
        """These blocks are complete in a layer. Their checksums are taken now, while no other request can have them. A name that
        a request has held blocks by is another's only after finished(): before, neither is handed over."""
        ids = _numbers(run.ids)
        with self._lock:
            self._session.call(lib.kv_session_save, self._number(transfer), layer, operator.index(run.first),
                               ids.buffer_info()[0], len(ids))

    def hold(self, transfer: str, request: str) -> None:
        """The request has ended; its blocks stay until finished() names it."""
        with self._lock:
            number = self._number(transfer)
            if number in self._held:  # of the same blocks
                self._freed.add(self._held[number][1])
            if number:
                self._held[number] = transfer, request
                self._session.call(lib.kv_session_hold, number)
            else:
                self._freed.add(request)

    def drop(self, transfer: str) -> None:
        """Withdraws the blocks: they must not be read any more."""
        with self._lock:
            self._session.call(lib.kv_session_drop, self._number(transfer))
            self._numbers.pop(transfer, None)

    def finished(self) -> Set[str]:
        """Requests whose blocks are free again."""
        with self._lock:
            number = ctypes.c_uint64()
            try:
                while self._session.ask(lib.kv_session_next_released, ctypes.byref(number), None) == 0:
                    self._free(number.value)
            except InvalidParamError:  # it is closed
                for each in list(self._held):
                    self._free(each)
            out, self._freed = self._freed, set()
            return out

    def _free(self, number: int) -> None:
        transfer, request = self._held.pop(number, ("", ""))
        if transfer:
            self._freed.add(request)
        if self._numbers.get(transfer) == number:
            del self._numbers[transfer]

    def _number(self, transfer: str) -> int:
        """0: the name is another request's too."""
        number = ctypes.c_uint64(self._numbers.get(transfer, 0))
        if not number:
            self._session.call(lib.kv_session_open, _text(transfer, "a transfer"), ctypes.byref(number))
            if number:
                self._numbers[transfer] = number.value
        return number.value


class Loads:
    """Decode's end."""

    def __init__(self, session: Handle, limits: Limits, memory: KvMemory) -> None:
        self._session, self.limits, self.memory = session, limits, memory
        self._count = itertools.count(1)
        self._orders: Dict[int, Order] = {}
        self._ended = Done(set(), set(), [])

    def start(self, order: Order) -> None:
        """What is wrong with an order is a load that failed; two of one transfer at a time are. InvalidParamError: it is
        closed, or this is a forked child."""
        self._session.ask(lambda session: None)
        number = next(self._count)
        if order.runs is not None:
            self._orders[number] = order
        try:
            self._start(number, order)
        except Exception as why:  # whatever it says
            if self._orders.pop(number, None) is not None:
                self._report(order, str(why) or repr(why))

    def _start(self, number: int, order: Order) -> None:
        ids = [_numbers(run.ids) for run in order.runs or ()]
        runs = [_library.KvRun(operator.index(run.first), each.buffer_info()[0], len(each), *tokens)
                for run, each, tokens in zip(order.runs or (), ids, order.tokens)]
        if order.runs is not None and not len(runs) == len(order.runs) == 1 + max(self.memory.groups):
            raise ValueError(f"{len(runs)} runs of blocks for {1 + max(self.memory.groups)} groups of layers")
        said = _library.KvOrder(
            ctypes.sizeof(_library.KvOrder), number, _text(order.transfer, "a transfer"), _text(order.agent, "an agent"),
            _text(order.address, "an address"), (_library.KvRun * len(runs))(*runs), len(runs), operator.index(order.ranks),
            order.sure, int(self.limits.load * 1e9), int(self.limits.silence * 1e9))
        self._session.call(lib.kv_session_load, ctypes.byref(said))

    def busy(self) -> bool:
        return bool(self._orders)

    def take(self, patience: float = 0) -> Done:
        """What has ended since the last call; waits so long for the first. Of one thread."""
        until = time.monotonic() + patience
        while True:
            left = 0 if self._ended.requests else max(0, until - time.monotonic())
            if not self._next(min(left, _SLICE)) and left <= _SLICE:
                ended, self._ended = self._ended, Done(set(), set(), [])
                return ended

    def _next(self, patience: float) -> bool:
        """Whether one has ended. All have when it is closed."""
        one, error = _library.KvLoaded(ctypes.sizeof(_library.KvLoaded)), _library.Error(ctypes.sizeof(_library.Error))
        try:
            self._session.ask(lib.kv_session_next_loaded, int(patience * 1e9), ctypes.byref(one), ctypes.byref(error))
        except InvalidParamError as why:
            one.id, error.result, error.text = next(iter(self._orders), 0), -1, str(why).encode()
        if not one.id:
            return False
        order = self._orders.pop(one.id)
        self._report(order, error.text.decode(errors="replace") if error.result else "", one)
        return True

    def _report(self, order: Order, why: str, one: Any = None) -> None:
        self._ended.requests.add(order.request)
        if why:
            log.warning("the KV of request %s was not loaded: %s; it is computed here", order.request, why)
            self._ended.failed.add(order.request)
            return
        counts = [len((order.runs or [])[group].ids) for group in self.memory.groups]  # of each layer
        size = sum(layer.bytes * count for layer, count in zip(self.memory.layers, counts))
        self._ended.loads.append((size, one.took / 1e9, sum(counts), one.reading / 1e9))


class HandOff:
    """`agent` is this worker's alone, with serve_metadata, and its name ends in "/" and the worker's number; `memory` is
    registered here. Caches go together whose `identity` is equal: the checkpoint and whatever else changes K and V.
    `lease`: seconds for which blocks are kept that no engine asks for. `about`: what engines of other makes are told besides.
    Calls may come from any thread; a forked child makes one of its own. `clock`, in seconds, for tests: nothing moves but
    by turn()."""

    def __init__(self, agent: Agent, memory: KvMemory, identity: str, limits: Limits = Limits(), lease: float = 60, *,
                 shard: Shard = Shard(), about: Optional[Dict[str, Any]] = None,
                 clock: Optional[Callable[[], float]] = None) -> None:
        self.agent, self.memory, self.identity, self.shard = agent, memory, identity, _with_heads(shard, memory)
        agent.register(*[(address, size, 0) for address, size in memory.ranges])
        said = {**(about or {}), **memory.said(), **self.shard._asdict(), "identity": identity, "lease": lease}
        self._clock = ctypes.cast(0, _library.Clock)
        if clock is not None:
            seconds = clock
            self._clock = _library.Clock(lambda _: int(seconds() * 1e9))
        made = agent._open.handle_of(lib.kv_session_create, json.dumps(said).encode(), self._clock, None)
        self._session = Handle(made, "session")
        self.sends, self.loads = Sends(self._session), Loads(self._session, limits, memory)
        atexit.register(self.close)  # before the library goes

    def turn(self) -> bool:
        """Hands out what came and moves the loads on. Whether any is under way."""
        return bool(self._session.ask(lib.kv_session_turn))

    def close(self) -> None:
        """Ends all of them, and the agent: loads that were under way have failed, and blocks that were held are free. Once
        is enough."""
        atexit.unregister(self.close)
        self._session.destroy()
        self.agent.close()


def _numbers(ids: Any) -> "array.array[int]":
    return array.array("I", [operator.index(block) for block in ids])


def _with_heads(shard: Shard, memory: KvMemory) -> Shard:
    """With the model's heads, where its layers say them."""
    said = {layer.packing.get("total_heads", layer.packing["heads"]) for layer in memory.layers if "heads" in layer.packing}
    if len(said) != 1 or shard.heads in said:
        return shard
    if shard.heads != Shard().heads:
        raise ValueError(f"the shard is one of a model with {shard.heads} KV heads, and its layers are of one with {said.pop()}")
    return shard._replace(heads=said.pop())
