"""Which worker of an engine this is, and what both ends of a hand-off have in common."""
from __future__ import annotations

import json
import time
from typing import Any, Callable, Dict, NamedTuple, Optional

from ..errors import BatonError
from .memory import KvMemory


class Shard(NamedTuple):
    """Which worker of its engine this is: rank `rank` of `ranks` in a pipeline's `stage`, of a model with `heads` KV
    heads (1 where all ranks hold the same)."""

    rank: int = 0
    ranks: int = 1
    heads: int = 1
    stage: int = 0


class End:
    """`identity`: what both engines must have in common; `about`: what engines of other makes are told besides."""

    def __init__(self, agent: Any, memory: KvMemory, identity: str, clock: Callable[[], float] = time.monotonic,
                 about: Optional[Dict[str, Any]] = None, shard: Shard = Shard()) -> None:
        self.agent, self.memory, self.identity, self.clock, self.shard = agent, memory, identity, clock, shard
        self.about = {**(about or {}), **memory.said(), "ranks": shard.ranks}

    def tell(self, whom: str, **message: Any) -> bool:
        """Whether it is on its way: else whom it is for is gone, or takes no more of them at this time."""
        try:
            self.agent.notify(whom, json.dumps(message).encode())
        except (BatonError, ValueError):  # or its name is no text
            return False
        return True

    @property
    def closed(self) -> bool:
        return self.agent._open.value is None

    def check_open(self) -> None:
        """Raises what each call of an agent that is closed, or of a forked child, does."""
        assert self.agent.handle
