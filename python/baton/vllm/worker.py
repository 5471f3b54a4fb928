"""Which worker of an engine this is, which of another's it hears, and what both ends of a hand-off have in common."""
from __future__ import annotations

import functools
import json
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set

from ..errors import BatonError
from .memory import KvMemory

MOST_RANKS = 256  # that anybody is believed


class Shard(NamedTuple):
    """Which worker of its engine this is: rank `rank` of `ranks` in a pipeline's `stage`, of a model with `heads` KV
    heads (1 where all ranks hold the same)."""

    rank: int = 0
    ranks: int = 1
    heads: int = 1
    stage: int = 0


def held(heads: int, ranks: int, rank: int) -> range:
    """The heads of a rank, as vLLM splits them. With more ranks than heads several hold the same."""
    first = rank * heads // ranks
    return range(first, max((rank + 1) * heads // ranks, first + 1))


@functools.lru_cache(maxsize=64)
def senders(heads: int, prefill: int, decode: int) -> List[Set[int]]:
    """For each rank of decode's, the ranks of prefill's that it hears: those that it reads heads from, and of those
    that nobody needs some, so that each of prefill's is told when its blocks are free. Both ends ask here: prefill has
    to know how many readers it has."""
    if not 0 < prefill <= MOST_RANKS or not 0 < decode <= MOST_RANKS:
        raise ValueError(f"tensor-parallel degrees of {prefill} and {decode}")
    out: List[Set[int]] = []
    for rank in range(decode):
        holders = [[p for p in range(prefill) if head in held(heads, prefill, p)] for head in held(heads, decode, rank)]
        out.append({each[rank % len(each)] for each in holders})
    for spare in set(range(prefill)).difference(*out):
        out[spare % decode].add(spare)
    return out


class End:
    """`identity`: what both engines must have in common; `about`: what engines of other makes are told besides."""

    def __init__(self, agent: Any, memory: KvMemory, identity: str, clock: Callable[[], float] = time.monotonic,
                 about: Optional[Dict[str, Any]] = None, shard: Shard = Shard()) -> None:
        self.agent, self.memory, self.identity, self.clock, self.shard = agent, memory, identity, clock, shard
        self.about = {**(about or {}), **memory.said(), "ranks": shard.ranks}

    def tell(self, whom: str, **message: Any) -> bool:
        """Whether it is not known to be gone."""
        try:
            self.agent.notify(whom, json.dumps(message).encode())
        except BatonError:
            return False
        return True
