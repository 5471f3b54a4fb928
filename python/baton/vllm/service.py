"""What a worker of the engine has of the connector: an agent over its cache, the two ends of a hand-off, and the
thread that serves them while the engine computes or sleeps."""
from __future__ import annotations

import json
import logging
import os
import select
import threading
import time
from typing import Any, Callable, Dict, Optional, Sequence

from .. import Agent
from .decode import Limits, Loads
from .groups import Group
from .memory import KvMemory
from .prefill import Sends
from .worker import Shard
from .weights import weights_digest

log = logging.getLogger("baton.vllm")
_NAP = 0.02  # how often deadlines are looked at while something is under way, in seconds


class Service:
    """`about`: what engines of other makes are told besides. `start_thread` False: nothing moves but by turn(), for
    tests."""

    def __init__(self, agent: Agent, memory: KvMemory, identity: str, limits: Limits, lease: float,
                 clock: Callable[[], float] = time.monotonic, start_thread: bool = True,
                 about: Optional[Dict[str, Any]] = None, shard: Shard = Shard()) -> None:
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
        """There is something new to do."""
        try:
            os.write(self._wake, b"x")
        except BlockingIOError:
            pass

    def close(self) -> None:
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
                (self.sends if said["kind"] in ("want", "done") else self.loads).heard(sender, said)
            except Exception as why:  # whatever a peer says, the thread lives
                log.warning("a message of %s is not understood: %r", sender, why)
        return self.loads.step()

    def _serve(self) -> None:
        while not self._stop:
            try:
                busy = self.turn()
            except Exception:
                log.exception("the thread of Baton's connector goes on after this")
                busy = True
            ready, _, _ = select.select([self.agent.event_fd, self._woken], [], [], _NAP if busy else None)
            for fd in ready:
                try:
                    os.read(fd, 4096)
                except BlockingIOError:
                    pass


def identity_of(config: Any, memory: KvMemory, groups: Sequence[Group], digest: str = "") -> str:
    """What two engines must agree on before one reads the other's cache: not in how it is cut into blocks and among
    workers. `digest`: weights_digest(), if it is known."""
    model = config.model_config
    return json.dumps([digest or weights_digest(config), _said_of(model.hf_config), str(model.dtype),
                       str(config.cache_config.cache_dtype), [group.window for group in groups], memory.groups],
                      sort_keys=True)


def _said_of(configuration: Any) -> Any:
    """A model's configuration, without the version of the library that has read it."""
    if not hasattr(configuration, "to_json_string"):
        return str(configuration)
    said = json.loads(configuration.to_json_string())
    said.pop("transformers_version", None)
    return said
