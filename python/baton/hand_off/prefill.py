"""The end that has the KV: says which layers of which blocks are ready, with their checksums, and keeps the blocks
until decode has read them or their lease is over. Decode reads; nothing is ever written into another engine.

Messages are JSON objects. From decode: want (also a sign of life; answered by alive), done. To decode: layout,
ready, alive, gone. want and layout say which worker of how many this is, and how a block of each layer is packed. Baton's own
server speaks them too (engine/handoff), and says nothing of these; for it want and layout say which checkpoint this
is ("model") and how a block of the cache is laid out ("kv")."""
from __future__ import annotations

import threading
import zlib
from typing import Any, Dict, List, Optional, Set, Tuple

from ..errors import BatonError
from ..kv import KvChecksums, KvShare, ranks_heard
from .end import End
from .memory import Layer, Packing, Run, packings_in


class _Send:
    """The KV of one request. `ready[layer]`: (block, checksum) of its blocks from number `first[layer]` on."""

    def __init__(self, layers: int, expires: float) -> None:
        self.ready: List[List[Tuple[int, int]]] = [[] for _ in range(layers)]
        self.first = [0] * layers
        self.readers: List[str] = []        # who asked for it
        self.done: Set[str] = set()         # who has all it wanted
        self.read = False                   # all of them have
        self.request: Optional[str] = None  # once the engine has handed its blocks over
        self.expires = expires


class Sends(End):
    """Calls may come from the engine's thread and from the service's."""

    def __init__(self, lease: float, *end: Any) -> None:
        super().__init__(*end)
        self.lease = lease
        self._lock = threading.Lock()
        self._sends: Dict[str, _Send] = {}
        # Of who has our layout, and each layer: checksums of what it reads; None: those of whole blocks.
        self._readers: Dict[str, List[Optional[KvChecksums]]] = {}

    # --- the engine

    def save(self, transfer: str, layer: int, run: Run) -> None:
        """These blocks are complete in a layer. Their checksums are taken now, while nobody else can have them."""
        with self._lock:
            send = self._send(transfer)
            ready = send.ready[layer]
            if send.first[layer] != run.first or [block for block, _ in ready] != run.ids[:len(ready)]:
                ready.clear()  # the engine took the blocks away meanwhile, and computed the request again
                send.first[layer] = run.first
            known, bytes_of = len(ready), self.memory.layers[layer].block
            ready += [(block, zlib.crc32(bytes_of(block))) for block in run.ids[known:]]
            for reader in send.readers:
                self._tell_ready(reader, transfer, send, layer, known)

    def hold(self, transfer: str, request: str) -> None:
        """The request has ended; its blocks stay until finished() names it."""
        with self._lock:
            send = self._send(transfer)
            send.request, send.expires = request, self.clock() + self.lease

    def drop(self, transfer: str) -> None:
        """The blocks are not to be read any more."""
        with self._lock:
            send = self._sends.pop(transfer, None)
            for reader in send.readers if send else ():
                self._tell(reader, kind="gone", transfer=transfer)

    def finished(self) -> Set[str]:
        """Requests whose blocks are free again."""
        with self._lock:
            now, out = self.clock(), set()
            for transfer, send in list(self._sends.items()):
                if now >= send.expires or (send.read and send.request is not None):
                    del self._sends[transfer]
                    if send.request is not None:
                        out.add(send.request)
            return out

    # --- decode

    def heard(self, sender: str, message: Dict[str, Any]) -> None:
        """A message of a reader's."""
        with self._lock:
            transfer = message["transfer"]
            send = self._sends.get(transfer)
            if message["kind"] == "done":
                if send is not None:
                    send.done.add(sender)
                    send.read = len(send.done) >= self._count_readers(message.get("ranks", 1))
                return
            if sender not in self._readers or message.get("first"):
                self._meet(sender, message)
            if send is None and not message["sure"]:
                send = self._send(transfer)  # the request is still on its way to this engine
            if send is not None and sender not in send.readers:
                send.readers.append(sender)
                for layer in range(len(send.ready)):
                    self._tell_ready(sender, transfer, send, layer, 0)
            if send is not None and send.request is not None:
                send.expires = self.clock() + self.lease  # whoever asks renews
            self._tell(sender, kind="alive" if send is not None else "gone", transfer=transfer)

    # --- both, with the lock

    def _send(self, transfer: str) -> _Send:
        return self._sends.setdefault(transfer, _Send(len(self.memory.layers), self.clock() + self.lease))

    def _count_readers(self, ranks: int) -> int:
        """Of so many workers of decode's, those that hear this one."""
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
        self._readers[reader] = sums

    def _checksums(self, ours: Layer, packing: Packing, share: KvShare) -> Optional[KvChecksums]:
        theirs = Layer(0, packing["bytes"], packing["bytes"], 1, packing)
        try:
            sums = KvChecksums(ours.layout(self.identity), theirs.layout(self.identity), share=share)
        except BatonError:  # the two do not fit, and decode says why
            return None
        return sums if sums.unit and sums.run_bytes != ours.bytes else None

    def _tell_ready(self, reader: str, transfer: str, send: _Send, layer: int, begin: int) -> None:
        ready = send.ready[layer][begin:]
        if not ready or reader not in self._readers:
            return
        sums, memory = self._readers[reader][layer], self.memory.layers[layer]
        blocks = [(block, self._pieces(memory, sums, block, whole) if sums else whole) for block, whole in ready]
        self._tell(reader, kind="ready", transfer=transfer, parts=[(layer, send.first[layer] + begin, blocks)])

    @staticmethod
    def _pieces(layer: Layer, sums: KvChecksums, block: int, whole: int) -> List[int]:
        """Of each piece of a block, for who does not take all of it. The whole one's checksum is taken again afterwards: if
        the block is another one by now, these are none."""
        pieces = sums.of_source([block], tokens=(0, layer.tokens))
        return pieces if zlib.crc32(layer.block(block)) == whole else [-1] * len(pieces)

    def _tell(self, reader: str, **message: Any) -> None:
        if not self.tell(reader, **message):
            self._readers.pop(reader, None)  # it is gone: the lease ends what it has not read
