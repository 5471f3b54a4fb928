"""A worker's half of all hand-offs, either way, and the thread that serves them while the engine computes or sleeps."""
from __future__ import annotations

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
    `lease`: seconds for which blocks are kept that nobody asks for. `about`: what engines of other makes are told besides.
    `start_thread` False: nothing moves but by turn(), for tests."""

    def __init__(self, agent: Agent, memory: KvMemory, identity: str, limits: Limits = Limits(), lease: float = 60, *,
                 shard: Shard = Shard(), about: Optional[Dict[str, Any]] = None,
                 clock: Callable[[], float] = time.monotonic, start_thread: bool = True) -> None:
        self.agent, self.memory = agent, memory
        agent.register(*[(address, size, 0) for address, size in memory.ranges])
        self.sends = Sends(lease, agent, memory, identity, clock, about, shard)
        self.loads = Loads(limits, agent, memory, identity, clock, about, shard)
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)[::-1]
        self._stop = False
        self._thread = threading.Thread(target=self._serve, name="baton-kv", daemon=True)
        if start_thread:
            self._thread.start()

    def wake(self) -> None:
        """There is something new to do: loads were started."""
        try:
            os.write(self._wake, b"x")
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Ends all of them, and the agent."""
        self._stop = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join()
        self.agent.close()
        os.close(self._wake)
        os.close(self._woken)

    def turn(self) -> bool:
        """Hands out what came and moves the loads on. Whether any is under way."""
        for sender, message in self.agent.messages():
            try:
                said = json.loads(message)
                end: Union[Sends, Loads] = self.sends if said["kind"] in ("want", "done") else self.loads
                end.heard(sender, said)
            except Exception as why:  # whatever a peer says, the thread lives
                log.warning("a message of %s is not understood: %r", sender, why)
        return self.loads.step()

    def _serve(self) -> None:
        while not self._stop:
            try:
                busy = self.turn()
            except Exception:
                log.exception("the thread of Baton's hand-offs goes on after this")
                busy = True
            ready, _, _ = select.select([self.agent.event_fd, self._woken], [], [], _NAP if busy else None)
            for fd in ready:
                try:
                    os.read(fd, 4096)
                except BlockingIOError:
                    pass
