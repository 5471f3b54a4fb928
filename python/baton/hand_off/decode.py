"""The end that wants the KV: asks the workers of prefill that hold it for a request's blocks, reads each layer by a
plan when it is ready, and checks every byte before the engine hears of it. What prefill does not deliver in time has
failed, and the engine computes it.

A load that failed is reported when no byte of it moves any more: the engine gives its blocks to others then."""
from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from typing import Any, Deque, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from ..agent import READ
from ..errors import BatonError
from ..kv import KvChecksums, KvPlan, KvShare, ranks_heard
from .end import End, Shard
from .memory import KvMemory, Layer, Run, packings_in

log = logging.getLogger("baton.hand_off")
_DRIVEN = 500e-6          # seconds for which reads are moved in this thread
_MOST_WAITING = 1 << 20  # blocks, in a load whose prefill has not said yet what they are


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


class _Passage(NamedTuple):
    """From a layer of another worker's to the same here."""

    plan: KvPlan
    sums: KvChecksums
    block_tokens: int  # of its blocks


class _Peer:
    """A worker of prefill's, as long as it is one and the same."""

    def __init__(self) -> None:
        self.fetched: Dict[str, float] = {}              # from which address, when
        self.there, self.looked = False, 0               # as of which step
        self.full = 0                                    # the step in which it took no more messages
        self.heard = -1e9
        self.told = False                                # it has our metadata
        self.said: Dict[str, Any] = {}                   # of its cache
        self.passages: Optional[List[_Passage]] = None  # of each layer
        self.refused = ""                                # why its blocks are not for us


class _Source:
    """A worker of prefill's, in a load."""

    def __init__(self, name: str, address: str, begins: List[int], now: float) -> None:
        self.name, self.address = name, address
        self.heard, self.looked, self.asked, self.answered = now, -1e9, -1e9, True
        self.peer: Optional[_Peer] = None  # the worker that was asked
        self.next = list(begins)      # of each layer, the first token that was not read from it
        self.waiting: List[Any] = []  # parts that came before its layout
        self.blocks = 0               # in these


class _Read(NamedTuple):
    transfer: Any
    source: _Source
    layer: int
    passage: _Passage
    first: int               # block of prefill's
    tokens: Tuple[int, int]
    checks: List[int]        # of each piece of its blocks


def _drive(transfer: Any) -> None:
    """Moves its bytes in this thread for a moment: most reads are over sooner than another thread wakes."""
    until = time.monotonic() + _DRIVEN
    with contextlib.suppress(BatonError):  # the next caller hears of it
        while not transfer.done() and time.monotonic() < until:
            pass


class _Load:
    def __init__(self, order: Order, memory: KvMemory, shard: Shard, now: float) -> None:
        self.order, self.started = order, now
        self.runs = [order.runs[group] for group in memory.groups] if order.runs is not None else []  # of each layer
        self.tokens = [order.tokens[group] for group in memory.groups] if order.runs is not None else []
        self.sources: Dict[str, _Source] = {}
        host, port = order.address.rsplit(":", 1)
        for rank in ranks_heard(shard.heads, order.ranks, shard.ranks, shard.rank):
            number = rank + shard.stage * order.ranks
            self.sources[f"{order.agent}/{number}"] = _Source(f"{order.agent}/{number}", f"{host}:{int(port) + number}",
                                                              [begin for begin, _ in self.tokens], now)
        # The most parts and blocks that wait. Prefill may have more of the prompt than is wanted here.
        self.most = max(_MOST_WAITING, 2 * sum(end + 1 for _, end in self.tokens))
        self.reads: List[_Read] = []
        self.reading_since = now      # while there are reads
        self.reading = 0.0            # seconds, of those that have ended
        self.why = ""                 # it failed


class Loads(End):
    """start() and take() are for the engine's thread, the rest for the service's."""

    def __init__(self, limits: Limits, *end: Any) -> None:
        super().__init__(*end)
        self.limits = limits
        self.layouts = [layer.layout(self.identity) for layer in self.memory.layers]
        self._orders: Deque[Order] = collections.deque()
        self._loads: Dict[str, _Load] = {}
        self._peers: Dict[str, _Peer] = {}
        self._unsaid: List[Tuple[str, str]] = []  # whom to tell that we have all we want of which transfer
        self._steps, self._stepped = 0, self.clock()
        self._changed = threading.Condition()
        self._ended = Done(set(), set(), [])

    # --- the engine

    def start(self, order: Order) -> None:
        """What is wrong with an order is a load that failed; two of one transfer at a time are. InvalidParamError: the
        agent is closed, or this is a forked child."""
        self.check_open()
        with self._changed:
            self.check_open()
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

    def close(self) -> None:
        """When the agent is closed, and nothing moves any more: what was under way has failed."""
        with self._changed:
            orders = [load.order for load in self._loads.values()] + list(self._orders)
            self._orders.clear()
            self._loads.clear()
        for order in orders:
            self._report(order, "the hand-off was closed")

    def heard(self, sender: str, message: Dict[str, Any]) -> None:
        """Handles a message from prefill."""
        peer = self._peers.get(sender)
        if peer is None:
            return
        peer.heard = self.clock()
        if message["kind"] == "layout":
            peer.said, peer.passages, peer.refused = message, None, ""
            return
        load = self._loads.get(message["transfer"])
        if load is None or load.why or sender not in load.sources:
            return
        source = load.sources[sender]
        source.heard, source.answered = self.clock(), True
        if message["kind"] == "gone":
            load.why = "prefill no longer has it"
        elif message["kind"] == "ready" and load.runs:
            source.waiting += message["parts"]
            source.blocks += sum(len(blocks) for _, _, blocks in message["parts"])
            if len(source.waiting) + source.blocks > load.most:
                load.why = f"prefill {sender} keeps reporting blocks without describing its cache"

    def step(self) -> bool:
        """Advances everything. Returns whether anything is in progress."""
        now = self.clock()
        self._steps += 1
        # Prefill is not silent while no thread listens: this engine had its processors, or was suspended.
        deaf, self._stepped = max(0.0, now - self._stepped - self.limits.ask), now
        for load in self._loads.values() if deaf else ():
            for source in load.sources.values():
                source.heard += deaf
        while self._orders:
            order = self._orders.popleft()
            try:
                self._begin(order, now)
            except Exception as why:  # whatever it says
                self._report(order, str(why) or repr(why))
        for load in list(self._loads.values()):
            try:
                self._move(load, now)
            except Exception as why:  # whatever a peer says, the load ends
                load.why = load.why or str(why) or repr(why)
            self._maybe_end(load)
        self._unsaid = [each for each in self._unsaid if not self._say_done(*each)]
        return self.busy() or bool(self._unsaid)

    def _begin(self, order: Order, now: float) -> None:
        other = self._loads.get(order.transfer)
        if other is None:
            self._loads[order.transfer] = _Load(order, self.memory, self.shard, now)
        elif order.runs is not None:
            raise ValueError(f"request {other.order.request} loads {order.transfer} at this time, too")

    def _learn(self, source: _Source, peer: _Peer, now: float) -> None:
        """By what a worker has said of its cache, once we can reach that: who has asked us is known without it."""
        try:
            there = self.agent.has_remote(source.name, [Layer.of_row(row, {}).span() for row in peer.said["rows"]])
            if there:
                peer.passages = self._passages(source.name, peer.said)
        except Exception as why:  # whatever it says
            peer.refused = str(why) or repr(why)
        else:
            if not there:
                self._fetch(source, peer, now)

    def _fetch(self, source: _Source, peer: _Peer, now: float) -> None:
        if now - peer.fetched.get(source.address, -1e9) >= self.limits.ask:
            peer.fetched[source.address] = now
            self.agent.ask_metadata(source.name, source.address)

    def _passages(self, sender: str, message: Dict[str, Any]) -> List[_Passage]:
        """Raises an error that says why, if the two do not fit."""
        if message["identity"] != self.identity:
            raise ValueError(f"prefill has another model or cache: {message['identity']}, here {self.identity}")
        packings = packings_in(message)
        if packings is None:  # of another make: its blocks are like ours
            packings = [layer.packing for layer in self.memory.layers]
            theirs, mine = (about.get("kv") for about in (message, self.about))
            if isinstance(theirs, dict) and isinstance(mine, dict) and theirs != mine:
                raise ValueError(f"prefill's blocks are laid out like {theirs}, and here like {mine}")
        if not len(packings) == len(message["rows"]) == len(self.layouts):
            raise ValueError(f"prefill has {len(message['rows'])} layers, and here are {len(self.layouts)}")
        ranks, out = message.get("ranks", 1), []
        share = KvShare(ranks, int(sender.rpartition("/")[2]) % ranks, self.shard.rank)
        for row, packing, mine in zip(message["rows"], packings, self.layouts):
            layer = Layer.of_row(row, packing)
            theirs = layer.layout(self.identity)
            plan = KvPlan(self.agent, READ, mine, sender, theirs, share=share)
            if not plan.complete:
                raise ValueError(f"prefill's {sender} does not have the heads that rank {share.rank} of {ranks} has")
            out.append(_Passage(plan, KvChecksums(theirs, mine, share=share), layer.tokens))
        return out

    def _move(self, load: _Load, now: float) -> None:
        if not load.why and now - load.started >= self.limits.load:
            load.why = f"not complete after {self.limits.load} s"
        for source in load.sources.values():
            if load.why:
                break
            peer = self._peers.get(source.name)
            if now - max(source.heard, peer.heard if peer else 0) >= self.limits.silence:
                load.why = f"prefill {source.name} is silent for {self.limits.silence} s"
            elif now - source.looked >= self.limits.ask:
                peer = self._look(load, source, now)
            if not load.why and peer is not None and peer.said:
                if not (peer.passages or peer.refused):
                    self._learn(source, peer, now)
                load.why = peer.refused
                ranks = peer.said.get("ranks", 1)
                if ranks != load.order.ranks:
                    load.why = (f"prefill has {ranks} ranks, but was expected to have {load.order.ranks}: "
                                "pass tp_size in kv_transfer_params")
                if peer.passages:
                    parts, source.waiting, source.blocks = source.waiting, [], 0
                    for layer, first, blocks in parts:
                        self._read(load, source, peer.passages[layer], layer, first, blocks)
                    if parts and load.reads:
                        _drive(load.reads[-1].transfer)
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
                read.source.heard = now
                self._check(load, read)
            if not load.reads:
                load.reading += self.clock() - load.reading_since

    def _look(self, load: _Load, source: _Source, now: float) -> _Peer:
        """Whether a worker of prefill's is still there; asks it."""
        peer = self._peers.get(source.name)
        if peer is None:
            for name in [name for name, old in self._peers.items() if old.told and not self._is_there(name, old)]:
                self._forget(name)
            peer = self._peers[source.name] = _Peer()
        there = self._is_there(source.name, peer)
        if not there and peer.told:  # it went, and may have come back
            self._forget(source.name)
            peer = self._peers[source.name] = _Peer()
        if source.peer not in (None, peer):
            load.why = f"prefill {source.name} is gone"
        elif not there:
            self._fetch(source, peer, now)
        elif not source.answered and now - source.asked < self.limits.silence:
            source.looked = now  # one question at a time: those of ten thousand loads are many
        elif peer.full != self._steps:
            if self.tell(source.name, kind="want", transfer=load.order.transfer, first=not peer.told, sure=load.order.sure,
                         metadata=self.agent.partial_metadata([]).hex(),  # how to reach us, and no memory
                         identity=self.identity, **self.about):  # silence ends what waits for an answer
                source.asked = source.looked = now
                source.answered, source.peer, peer.told = False, peer, True
            else:
                peer.full = self._steps
        return peer

    def _is_there(self, name: str, peer: _Peer) -> bool:
        if peer.looked != self._steps:
            peer.there, peer.looked = self.agent.has_remote(name), self._steps
        return peer.there

    def _forget(self, name: str) -> None:
        self.agent.remove_remote(name)
        del self._peers[name]

    def _read(self, load: _Load, source: _Source, passage: _Passage, layer: int, first: int, blocks: List[Any]) -> None:
        """Of prefill's blocks from its block `first` on, what is wanted and was not read yet."""
        if not load.runs or not passage.plan.layers:
            return
        begin, size = source.next[layer], passage.block_tokens
        end = min((first + len(blocks)) * size, load.tokens[layer][1])
        if begin >= end:
            return
        if begin < first * size:
            # Both sides keep a window in whole blocks: vLLM gives ours to other prompts that begin alike.
            raise ValueError(f"prefill does not keep token {begin} of layer {layer}'s window: give it blocks that are not "
                             "smaller than these here")
        if not load.reads:
            load.reading_since = self.clock()
        run, source.next[layer] = load.runs[layer], end
        read = passage.plan.post(run.ids, [block for block, _ in blocks], tokens=(begin, end), local_first_block=run.first,
                                 remote_first_block=first)
        # One of a whole block, or of each piece of it.
        checks = [check for _, said in blocks for check in (said if isinstance(said, list) else [said])]
        load.reads.append(_Read(read, source, layer, passage, first, (begin, end), checks))

    def _check(self, load: _Load, read: _Read) -> None:
        run, sums, size = load.runs[read.layer], read.passage.sums, read.passage.block_tokens
        found = sums.of_target(run.ids, tokens=read.tokens, first_block=run.first)
        before = read.tokens[0] // sums.unit - read.first * size // sums.unit  # pieces that are not wanted
        if found != read.checks[before:before + len(found)]:
            load.why = f"layer {read.layer} has a wrong checksum in tokens {read.tokens[0]} to {read.tokens[1]}"

    def _is_complete(self, load: _Load) -> bool:
        for source in load.sources.values():
            if source.peer is None:
                return False
            passages = source.peer.passages
            if load.runs and (not passages or any(passage.plan.layers and begin < end for passage, begin, (_, end) in zip(
                    passages, source.next, load.tokens))):
                return False
        return True

    def _maybe_end(self, load: _Load) -> None:
        order = load.order
        if load.reads or not (load.why or self._is_complete(load)):
            return
        del self._loads[order.transfer]
        for name in load.sources:
            self._unsaid.append((name, order.transfer))
            if name in self._peers and not self._peers[name].told:
                del self._peers[name]  # whoever that is: other loads look for it themselves
        if load.why:
            self._report(order, load.why)
            return
        size = sum(layer.bytes * len(run.ids) for layer, run in zip(self.memory.layers, load.runs))
        blocks = sum(len(run.ids) for run in load.runs)
        self._report(order, "", [(size, self.clock() - load.started, blocks, load.reading)])

    def _report(self, order: Order, why: str, loads: Sequence[Tuple[int, float, int, float]] = ()) -> None:
        if order.runs is None:
            return
        if why:
            log.warning("the KV of request %s was not loaded: %s; it is computed here", order.request, why)
        with self._changed:
            self._ended.requests.add(order.request)
            if why:
                self._ended.failed.add(order.request)
            self._ended.loads.extend(loads)
            self._changed.notify_all()

    def _say_done(self, name: str, transfer: str) -> bool:
        """Whether it was sent, or no peer is there to receive it."""
        peer = self._peers.get(name)
        if peer is None or not self._is_there(name, peer):
            return True
        if peer.full != self._steps and self.tell(name, kind="done", transfer=transfer, ranks=self.shard.ranks):
            return True
        peer.full = self._steps
        return False
