"""The end that wants the KV: asks prefill for a request's blocks, reads each layer when it is ready, and checks every
block before the engine hears of it. What prefill does not deliver in time has failed, and the engine computes it.

A load that failed is reported when no byte of it moves any more: the engine gives its blocks to others then."""
from __future__ import annotations

import collections
import json
import logging
import threading
import time
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional, Set, Tuple

from ..errors import BatonError
from .groups import Run
from .memory import KvMemory, starts_of

log = logging.getLogger("baton.vllm")


class Order(NamedTuple):
    """What the scheduler wants loaded: a run of this engine's blocks in each group of layers. None: nothing; prefill may
    have its blocks back. `sure`: prefill has ended, so it must know of the transfer."""

    request: str
    transfer: str
    agent: str
    address: str
    runs: Optional[List[Run]]
    sure: bool


class Limits(NamedTuple):
    """In seconds: how long prefill may stay silent, how long a load may take in all, how often prefill is asked."""

    silence: float = 1.0
    load: float = 60.0
    ask: float = 0.25


class Done(NamedTuple):
    """What has ended: requests, those of them that failed, and of each load that did not (bytes, seconds, blocks, seconds
    in which they were read and checked)."""

    requests: Set[str]
    failed: Set[str]
    loads: List[Tuple[int, float, int, float]]


class _Read(NamedTuple):
    transfer: Any
    parts: List[Tuple[int, int, int]]  # layer, number of the block in the request, checksum


class _Load:
    def __init__(self, order: Order, memory: KvMemory, now: float) -> None:
        self.order, self.started, self.heard, self.asked = order, now, now, -1e9
        self.runs = [order.runs[group] for group in memory.groups] if order.runs is not None else []  # of each layer
        self.missing = {(layer, run.first + i) for layer, run in enumerate(self.runs) for i in range(len(run.ids))}
        self.reads: List[_Read] = []
        self.waiting: List[Any] = []  # parts that came before the peer's layout
        self.reading_since = now      # while there are reads
        self.reading = 0.0            # seconds, of those that have ended
        self.why = ""                 # it failed

    def block(self, layer: int, number: int) -> int:
        """Ours, for a block of the request."""
        return self.runs[layer].ids[number - self.runs[layer].first]


class _Peer:
    def __init__(self) -> None:
        self.fetched = -1e9
        self.told = False              # it has our metadata
        self.blocks = None             # its prepared list
        self.starts: List[int] = []    # of its layers in that
        self.refused = ""              # why its blocks are not for us


class Loads:
    """start() and take() are for the engine's thread, the rest for the service's."""

    def __init__(self, agent: Any, memory: KvMemory, identity: str, limits: Limits = Limits(),
                 clock: Callable[[], float] = time.monotonic, about: Optional[Dict[str, Any]] = None) -> None:
        self.agent, self.memory, self.identity, self.limits, self.clock = agent, memory, identity, limits, clock
        self.about = about or {}
        self.local = agent.prepare(memory.rows())
        self._orders: Deque[Order] = collections.deque()
        self._loads: Dict[str, _Load] = {}
        self._peers: Dict[str, _Peer] = {}
        self._changed = threading.Condition()
        self._ended = Done(set(), set(), [])

    # --- the engine

    def start(self, order: Order) -> None:
        self._orders.append(order)

    def busy(self) -> bool:
        return bool(self._orders or self._loads)

    def take(self, patience: float = 0) -> Done:
        """What has ended since the last call; waits so long for the first."""
        with self._changed:
            if patience and not self._ended.requests:
                self._changed.wait(patience)
            ended, self._ended = self._ended, Done(set(), set(), [])
            return ended

    # --- the service

    def heard(self, sender: str, message: Dict[str, Any]) -> None:
        """A message of a prefill's."""
        peer = self._peers.get(sender)
        if peer is None:
            return
        if message["kind"] == "layout":
            self._learn(sender, peer, message)
            return
        load = self._loads.get(message["transfer"])
        if load is None or load.order.agent != sender or load.why:
            return
        load.heard = self.clock()
        if message["kind"] == "gone":
            load.why = "prefill does not have it any more"
        elif message["kind"] == "ready":
            load.waiting += message["parts"]

    def step(self) -> bool:
        """Moves everything on. Whether anything is under way."""
        while self._orders:
            order = self._orders.popleft()
            self._loads[order.transfer] = _Load(order, self.memory, self.clock())
        for load in list(self._loads.values()):
            try:
                self._move(load)
            except (BatonError, ValueError, TypeError, IndexError) as why:
                load.why = load.why or str(why)
            self._maybe_end(load)
        return self.busy()

    def _learn(self, sender: str, peer: _Peer, message: Dict[str, Any]) -> None:
        rows = message["rows"]
        sizes = [layer.bytes for layer in self.memory.layers]
        if message["identity"] != self.identity or [row[1] for row in rows] != sizes:
            peer.refused = f"prefill has another model or cache: {message['identity']}, here {self.identity}"
            return
        theirs, mine = (about.get("kv") for about in (message, self.about))
        if isinstance(theirs, dict) and isinstance(mine, dict) and theirs != mine:  # of one size, but by another processor's kernels
            peer.refused = f"prefill's blocks are laid out like {theirs}, and here like {mine}"
            return
        peer.blocks = self.agent.prepare([tuple(row) for row in rows], sender)
        peer.starts = starts_of(rows)

    def _move(self, load: _Load) -> None:
        now, order = self.clock(), load.order
        if not load.why:
            if now - load.started >= self.limits.load:
                load.why = f"not complete after {self.limits.load} s"
            elif now - load.heard >= self.limits.silence:
                load.why = f"prefill {order.agent} is silent for {self.limits.silence} s"
            elif now - load.asked >= self.limits.ask:
                self._ask(load, now)
        peer = self._peers.get(order.agent)
        if not load.why and peer is not None and peer.refused:
            load.why = peer.refused
        if not load.why and peer is not None and peer.blocks is not None:
            parts, load.waiting = load.waiting, []
            self._read(load, peer, parts)
        for read in list(load.reads):
            if load.why:
                read.transfer.abort()
            try:
                if not read.transfer.done():
                    continue
            except BatonError as why:
                load.why = load.why or str(why)
            load.reads.remove(read)
            read.transfer.release()
            if not load.why:
                load.heard = now
                self._check(load, read)
            if not load.reads:
                load.reading += self.clock() - load.reading_since

    def _ask(self, load: _Load, now: float) -> None:
        order = load.order
        peer = self._peers.setdefault(order.agent, _Peer())
        if not self.agent.has_remote(order.agent):
            if peer.told:  # it went, and may have come back
                self.agent.remove_remote(order.agent)
                self._peers[order.agent] = peer = _Peer()
                if load.asked > 0:
                    load.why = f"prefill {order.agent} is gone"
                    return
            if now - peer.fetched >= self.limits.ask:
                peer.fetched = now
                self.agent.fetch_metadata(order.agent, order.address)
            return
        load.asked = now
        if order.runs is not None:
            self._tell(load, kind="want", first=not peer.told, sure=order.sure,
                       metadata=self.agent.partial_metadata([]).hex(),  # how to reach us, and no memory
                       identity=self.identity, **self.about)
            peer.told = True

    def _read(self, load: _Load, peer: _Peer, parts: List[Any]) -> None:
        mine, theirs, checks = [], [], []
        for layer, first, blocks in parts:
            for number, (block, crc) in enumerate(blocks, start=first):
                if (layer, number) in load.missing:
                    load.missing.discard((layer, number))
                    mine.append(self.memory.index(layer, load.block(layer, number)))
                    theirs.append(peer.starts[layer] + block)
                    checks.append((layer, number, crc))
        if mine and not load.reads:
            load.reading_since = self.clock()
        if mine:
            load.reads.append(_Read(self.agent.read(self.local, mine, peer.blocks, theirs), checks))

    def _check(self, load: _Load, read: _Read) -> None:
        for layer, number, crc in read.parts:
            if self.memory.crc(layer, load.block(layer, number)) != crc:
                load.why = f"block {number} of layer {layer} has a wrong checksum"
                return

    def _maybe_end(self, load: _Load) -> None:
        order = load.order
        if load.reads or not (load.why or (load.asked >= 0 and not load.missing)):
            return
        del self._loads[order.transfer]
        self._tell(load, kind="done")
        if order.runs is None:
            return
        if load.why:
            log.warning("the KV of request %s was not loaded: %s; it is computed here", order.request, load.why)
        with self._changed:
            self._ended.requests.add(order.request)
            if load.why:
                self._ended.failed.add(order.request)
            else:
                size = sum(layer.bytes * len(run.ids) for layer, run in zip(self.memory.layers, load.runs))
                blocks = sum(len(run.ids) for run in load.runs)
                self._ended.loads.append((size, self.clock() - load.started, blocks, load.reading))
            self._changed.notify_all()

    def _tell(self, load: _Load, **message: Any) -> None:
        try:
            self.agent.notify(load.order.agent, json.dumps(dict(message, transfer=load.order.transfer)).encode())
        except BatonError:
            pass  # silence ends what waits for an answer
