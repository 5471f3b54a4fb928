"""The end that has the KV: says which layers of which blocks are ready, with their checksums, and keeps the blocks
until decode has read them or their lease is over. Decode reads; nothing is ever written into another engine.

Messages are JSON objects. From decode: want (also a sign of life; answered by alive), done. To decode: layout,
ready, alive, gone. want and layout say which worker of how many this is, and how a block of each layer is packed. Baton's own
server speaks them too (engine/handoff), and says nothing of these; for it want and layout say which checkpoint this
is ("model") and how a block of the cache is laid out ("kv")."""
from __future__ import annotations

import logging
import operator
import threading
import zlib
from typing import Any, Dict, List, Optional, Set, Tuple

from ..errors import BatonError
from ..kv import KvChecksums, KvShare, ranks_heard
from .end import End
from .memory import Layer, Packing, Run, packings_in

log = logging.getLogger("baton.hand_off")
_MOST_AWAITED = 1 << 14  # transfers that were asked for and that the engine has not heard of yet
_SUMS_AT_ONCE = 2000     # in a message: longer ones may have to wait for a reader that stands still


class _Send:
    """The KV of one request. `ready[layer]`: (block, checksum) of its blocks from number `first[layer]` on."""

    def __init__(self, layers: int, expires: float) -> None:
        self.ready: List[List[Tuple[int, int]]] = [[] for _ in range(layers)]
        self.first = [0] * layers
        self.readers: List[str] = []        # readers that have not all of it yet
        self.done: Set[str] = set()         # readers that have all they wanted
        self.needed = 0                     # how many these have to be, as they say
        self.request: Optional[str] = None  # once the engine has handed its blocks over
        self.refused = False                # two requests have its name: whose blocks they are, no side can tell
        self.expires = expires

    def unlist(self, reader: str) -> None:
        """If it asks again, it is told of all of them again."""
        if reader in self.readers:
            self.readers.remove(reader)


class Sends(End):
    """Calls may come from the engine's thread and from the service's."""

    def __init__(self, lease: float, *end: Any) -> None:
        super().__init__(*end)
        self.lease = lease
        self._lock = threading.Lock()
        self._sends: Dict[str, _Send] = {}
        self._awaited: Set[str] = set()  # of these, those that were asked for only
        self._freed: Set[str] = set()    # requests that finished() is to name
        # For readers with our layout, per layer: checksums of what they read; None: those of whole blocks.
        self._readers: Dict[str, List[Optional[KvChecksums]]] = {}

    # --- the engine

    def save(self, transfer: str, layer: int, run: Run) -> None:
        """These blocks are complete in a layer. Their checksums are taken now, while no other request can have them. A name that
        a request has held blocks by is another's only after finished(): before, neither is handed over."""
        first, ids = operator.index(run.first), [operator.index(block) for block in run.ids]
        with self._lock:
            send = self._send(transfer)
            self._awaited.discard(transfer)
            ready, send.expires = send.ready[layer], self.clock() + self.lease
            if send.first[layer] != first or [block for block, _ in ready] != ids[:len(ready)]:
                if send.request is not None:
                    self._refuse(transfer, send)
                ready.clear()  # the engine took the blocks away meanwhile, and computed the request again
                send.first[layer] = first
            if send.refused:
                return
            known, bytes_of = len(ready), self.memory.layers[layer].block
            ready += [(block, zlib.crc32(bytes_of(block))) for block in ids[known:]]
            for reader in list(send.readers):
                self._tell_ready(reader, transfer, send, [(layer, known)])

    def hold(self, transfer: str, request: str) -> None:
        """The request has ended; its blocks stay until finished() names it."""
        with self._lock:
            send = self._send(transfer)
            self._awaited.discard(transfer)
            if send.refused:
                self._freed.add(request)
                return
            if send.request is not None and send.request != request:
                self._freed.add(send.request)  # of the same blocks
            send.request, send.expires = request, self.clock() + self.lease

    def drop(self, transfer: str) -> None:
        """Withdraws the blocks: they must not be read any more."""
        with self._lock:
            self._drop(transfer)

    def finished(self) -> Set[str]:
        """Requests whose blocks are free again."""
        with self._lock:
            now, closed = self.clock(), self.closed
            for transfer, send in list(self._sends.items()):
                if now >= send.expires or closed or (send.request is not None and self._is_read(send)):
                    self._forget(transfer)
            out, self._freed = self._freed, set()
            return out

    # --- decode

    def heard(self, sender: str, message: Dict[str, Any]) -> None:
        """Handles a message from a reader."""
        with self._lock:
            transfer = message["transfer"]
            send = self._sends.get(transfer)
            if message["kind"] == "done":
                if send is not None:
                    send.needed = self._count_readers(message.get("ranks", 1))
                    send.done.add(sender)
                    send.unlist(sender)
                return
            if sender not in self._readers or message.get("first"):
                self._meet(sender, message)
                for each in self._sends.values():  # what it was told before, it may not have heard, or another of its name
                    each.unlist(sender)
            if send is None and not message["sure"] and len(self._awaited) < _MOST_AWAITED:
                send = self._send(transfer)  # the request is still on its way to this engine
                self._awaited.add(transfer)
            if send is None or send.refused:
                self._tell(sender, kind="gone", transfer=transfer)
                return
            if send.request is not None:
                send.expires = self.clock() + self.lease  # each request renews
            if sender not in send.readers:
                send.readers.append(sender)
                send.done.discard(sender)
                self._tell_ready(sender, transfer, send, [(layer, 0) for layer in range(len(send.ready))])
            self._tell(sender, kind="alive", transfer=transfer)

    # --- both, with the lock

    def _send(self, transfer: str) -> _Send:
        send = self._sends.get(transfer)
        if send is None:
            send = self._sends[transfer] = _Send(len(self.memory.layers), self.clock() + self.lease)
        return send

    def _forget(self, transfer: str) -> Optional[_Send]:
        self._awaited.discard(transfer)
        send = self._sends.pop(transfer, None)
        if send is not None and send.request is not None:
            self._freed.add(send.request)
        return send

    def _drop(self, transfer: str) -> None:
        send = self._forget(transfer)
        for reader in send.readers if send else ():
            self._tell(reader, kind="gone", transfer=transfer)

    def _refuse(self, transfer: str, send: _Send) -> None:
        log.warning("two requests have the transfer %s, one of them %s: neither is handed over", transfer, send.request)
        self._drop(transfer)
        send.request, send.refused, send.readers = None, True, []
        send.ready = [[] for _ in send.ready]
        self._sends[transfer] = send

    def _is_read(self, send: _Send) -> bool:
        """Whether all its readers have all of it; readers that are gone do not count."""
        if not send.needed or len(send.done) < send.needed:
            return False
        send.readers = [reader for reader in send.readers if self.agent.has_remote(reader)]
        return not send.readers

    def _count_readers(self, ranks: int) -> int:
        """Which of decode's workers this one sends to."""
        shard = self.shard
        if ranks < 1:
            raise ValueError(f"a reader that is one of {ranks} workers")
        return sum(shard.rank in ranks_heard(shard.heads, shard.ranks, ranks, rank) for rank in range(ranks))

    def _meet(self, reader: str, message: Dict[str, Any]) -> None:
        ours, theirs = self.memory.layers, packings_in(message)
        sums: List[Optional[KvChecksums]] = [None] * len(ours)
        if theirs is not None and len(theirs) == len(ours):
            share = KvShare(self.shard.ranks, self.shard.rank, int(reader.rpartition("/")[2]) % message["ranks"])
            sums = [self._checksums(*pair, share) for pair in zip(ours, theirs)]
        self.agent.add_remote(bytes.fromhex(message["metadata"]))
        self._tell(reader, kind="layout", identity=self.identity, rows=[layer.row() for layer in ours], **self.about)
        for gone in [name for name in self._readers if not self.agent.has_remote(name)]:
            del self._readers[gone]
        self._readers[reader] = sums

    def _checksums(self, ours: Layer, packing: Packing, share: KvShare) -> Optional[KvChecksums]:
        theirs = Layer(0, packing["bytes"], packing["bytes"], 1, packing)
        try:
            sums = KvChecksums(ours.layout(self.identity), theirs.layout(self.identity), share=share)
        except BatonError:  # the two do not fit, and decode says why
            return None
        return sums if sums.unit and sums.run_bytes != ours.bytes else None

    def _tell_ready(self, reader: str, transfer: str, send: _Send, begins: List[Tuple[int, int]]) -> None:
        """Of each (layer, begin), what is ready from its entry `begin` on. In few messages: a reader that has them all
        posts all its reads at once."""
        if reader not in self._readers:
            return
        parts: List[Tuple[int, int, List[Tuple[int, Any]]]] = []
        room = _SUMS_AT_ONCE
        for layer, begin in begins:
            sums, memory, ready = self._readers[reader][layer], self.memory.layers[layer], send.ready[layer]
            each = memory.tokens if sums else 1  # checksums of a block, at most
            while begin < len(ready):
                count = min(len(ready) - begin, max(room // each, 0 if parts else 1))
                if not count:
                    if not self._tell(reader, kind="ready", transfer=transfer, parts=parts):
                        return
                    parts, room = [], _SUMS_AT_ONCE
                    continue
                blocks = [(block, self._pieces(memory, sums, block, whole) if sums else whole)
                          for block, whole in ready[begin:begin + count]]
                parts.append((layer, send.first[layer] + begin, blocks))
                begin, room = begin + count, room - count * each
        if parts:
            self._tell(reader, kind="ready", transfer=transfer, parts=parts)

    @staticmethod
    def _pieces(layer: Layer, sums: KvChecksums, block: int, whole: int) -> List[int]:
        """Of each piece of a block, for who does not take all of it. The whole one's checksum is taken again afterwards: if
        the block is another one by now, these are none."""
        pieces = sums.of_source([block], tokens=(0, layer.tokens))
        return pieces if zlib.crc32(layer.block(block)) == whole else [-1] * len(pieces)

    def _tell(self, reader: str, **message: Any) -> bool:
        told = self.tell(reader, **message)
        if not told:
            self._readers.pop(reader, None)  # if it asks again, it is met again
        return told
