"""The end that has the KV: says which layers of which blocks are ready, with their checksums, and keeps the blocks
until decode has read them or their lease is over. Decode reads; nothing is ever written into another engine.

Messages are JSON objects. From decode: want (also a sign of life; answered by alive), done. To decode: layout,
ready, alive, gone. Baton's own server speaks them too (engine/handoff); for it want and layout say which checkpoint this
is ("model") and how a block of the cache is laid out ("kv")."""
from __future__ import annotations

import json
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Set

from ..errors import BatonError
from .groups import Run
from .memory import KvMemory


class _Send:
    """The KV of one request. `ready[layer]`: (block, checksum) of its blocks from number `first[layer]` on."""

    def __init__(self, layers: int, expires: float) -> None:
        self.ready: List[List[Sequence[int]]] = [[] for _ in range(layers)]
        self.first = [0] * layers
        self.reader = ""                    # who asked for it
        self.request: Optional[str] = None  # once the engine has handed its blocks over
        self.read = False                   # the reader has all it wanted
        self.expires = expires


class Sends:
    """Calls may come from the engine's thread and from the service's."""

    def __init__(self, agent: Any, memory: KvMemory, identity: str, lease: float,
                 clock: Callable[[], float] = time.monotonic, about: Optional[Dict[str, Any]] = None) -> None:
        self.agent, self.memory, self.identity, self.lease, self.clock = agent, memory, identity, lease, clock
        self.about = about or {}
        self._lock = threading.Lock()
        self._sends: Dict[str, _Send] = {}
        self._answered: Set[str] = set()  # who has our layout

    # --- the engine

    def save(self, transfer: str, layer: int, run: Run) -> None:
        """These blocks are complete in a layer. Their checksums are taken now, while nobody else can have them."""
        with self._lock:
            send = self._send(transfer)
            ready = send.ready[layer]
            if send.first[layer] != run.first or [block for block, _ in ready] != run.ids[:len(ready)]:
                ready.clear()  # the engine took the blocks away meanwhile, and computed the request again
                send.first[layer] = run.first
            known = len(ready)
            ready += [(block, self.memory.crc(layer, block)) for block in run.ids[known:]]
            if send.reader and len(ready) > known:
                self._tell(send.reader, kind="ready", transfer=transfer,
                           parts=[(layer, run.first + known, ready[known:])])

    def hold(self, transfer: str, request: str) -> None:
        """The request has ended; its blocks stay until finished() names it."""
        with self._lock:
            send = self._send(transfer)
            send.request, send.expires = request, self.clock() + self.lease

    def drop(self, transfer: str) -> None:
        """The blocks are not to be read any more."""
        with self._lock:
            send = self._sends.pop(transfer, None)
            if send and send.reader:
                self._tell(send.reader, kind="gone", transfer=transfer)

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
            if message["kind"] == "done":
                send = self._sends.get(message["transfer"])
                if send is not None:
                    send.read = True
                return
            if sender not in self._answered or message.get("first"):
                self.agent.add_remote(bytes.fromhex(message["metadata"]))
                self._tell(sender, kind="layout", identity=self.identity, rows=self.memory.rows(), **self.about)
                self._answered.add(sender)
            transfer = message["transfer"]
            send = self._sends.get(transfer)
            if send is None and not message["sure"]:
                send = self._send(transfer)  # the request is still on its way to this engine
            if send is not None and send.reader != sender:
                send.reader = sender
                parts = [(layer, send.first[layer], ready) for layer, ready in enumerate(send.ready) if ready]
                if parts:
                    self._tell(sender, kind="ready", transfer=transfer, parts=parts)
            if send is not None and send.request is not None:
                send.expires = self.clock() + self.lease  # whoever asks renews
            self._tell(sender, kind="alive" if send is not None else "gone", transfer=transfer)

    # --- both, with the lock

    def _send(self, transfer: str) -> _Send:
        return self._sends.setdefault(transfer, _Send(len(self.memory.layers), self.clock() + self.lease))

    def _tell(self, reader: str, **message: Any) -> None:
        try:
            self.agent.notify(reader, json.dumps(message).encode())
        except BatonError:
            self._answered.discard(reader)  # it is gone: the lease ends what it has not read
