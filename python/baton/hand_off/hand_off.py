"""A worker's half of all hand-offs, either way, and the thread that serves them while the engine computes or sleeps."""
from __future__ import annotations

import atexit
import json
import logging
import os
import select
import threading
import time
from typing import Any, Callable, Dict, Optional, Union

from ..agent import Agent
from .decode import Limits, Loads
from .end import Shard
from .memory import KvMemory
from .prefill import Sends

log = logging.getLogger("baton.hand_off")
_NAP = 0.02  # how often deadlines are looked at while something is under way, in seconds


class HandOff:
    """`agent` is this worker's alone, with serve_metadata, and its name ends in "/" and the worker's number; `memory` is
    registered here. Caches go together whose `identity` is equal: the checkpoint and whatever else changes K and V.
    `lease`: seconds for which blocks are kept that no engine asks for. `about`: what engines of other makes are told besides.
    Calls may come from any thread; a forked child makes one of its own. `start_thread` False: nothing moves but by turn(),
    for tests."""

    def __init__(self, agent: Agent, memory: KvMemory, identity: str, limits: Limits = Limits(), lease: float = 60, *,
                 shard: Shard = Shard(), about: Optional[Dict[str, Any]] = None,
                 clock: Callable[[], float] = time.monotonic, start_thread: bool = True) -> None:
        self.agent, self.memory = agent, memory
        shard = _with_heads(shard, memory)
        agent.register(*[(address, size, 0) for address, size in memory.ranges])
        self.sends = Sends(lease, agent, memory, identity, clock, about, shard)
        self.loads = Loads(limits, agent, memory, identity, clock, about, shard)
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)[::-1]
        self._event = agent._open.with_event_fd(os.dup)  # the agent's may be closed meanwhile, and be another file's
        self._stop = self._closed = False
        self._closing, self._process = threading.Lock(), os.getpid()
        self._thread = threading.Thread(target=self._serve, name="baton-kv", daemon=True)
        if start_thread:
            self._thread.start()
            atexit.register(self.close)  # before the agent goes, which the thread would be told of

    def wake(self) -> None:
        """Wakes the service thread: loads were started."""
        with self._closing:
            if not self._closed:
                self._poke()

    def close(self) -> None:
        """Ends all of them, and the agent: loads that were under way have failed, and blocks that were held are free. Once
        is enough."""
        with self._closing:
            if self._closed or os.getpid() != self._process:
                return
            self._closed = self._stop = True
            self._poke()
            if self._thread.is_alive():
                self._thread.join()
            atexit.unregister(self.close)
            self.agent.close()
            self.loads.close()
            for fd in (self._wake, self._woken, self._event):
                os.close(fd)

    def _poke(self) -> None:
        try:
            os.write(self._wake, b"x")
        except BlockingIOError:  # it will see those that are there
            pass

    def turn(self) -> bool:
        """Hands out what came and moves the loads on. Whether any is under way."""
        for sender, message in self.agent.messages():
            try:
                said = json.loads(message)
                end: Union[Sends, Loads] = self.sends if said["kind"] in ("want", "done") else self.loads
                end.heard(sender, said)
            except Exception as why:  # whatever a peer says, the thread lives
                log.warning("cannot parse a message from %s: %r", sender, why)
        return self.loads.step()

    def _serve(self) -> None:
        poll = select.poll()  # select.select() takes no descriptor above 1,023
        for fd in (self._event, self._woken):
            poll.register(fd, select.POLLIN)
        while not self._stop:
            try:
                busy = self.turn()
            except Exception:
                if self.agent._open.value is None:  # its owner has closed it
                    self.loads.close()
                    return
                log.exception("error in the thread of Baton's hand-offs, which continues")
                busy = True
            for fd, _ in poll.poll(1000 * _NAP if busy else None):
                try:
                    os.read(fd, 4096)
                except BlockingIOError:
                    pass


def _with_heads(shard: Shard, memory: KvMemory) -> Shard:
    """With the model's heads, where its layers say them."""
    said = {layer.packing.get("total_heads", layer.packing["heads"]) for layer in memory.layers if "heads" in layer.packing}
    if len(said) != 1 or shard.heads in said:
        return shard
    if shard.heads != Shard().heads:
        raise ValueError(f"the shard is one of a model with {shard.heads} KV heads, and its layers are of one with {said.pop()}")
    return shard._replace(heads=said.pop())
