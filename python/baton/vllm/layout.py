"""What is in a block of this engine's cache: where K and V lie, for plans, and for an engine of another make that
converts them (Baton's own server). Kernels pack blocks as their processor likes it, and nothing here knows how: a layer
writes numbered K and V into a block of its own, and where they are found is the answer."""
from __future__ import annotations

import logging
from typing import Any, Dict, List, Sequence, Union

from .groups import Group
from .memory import BYTES, Kind
from .worker import Shard, held

log = logging.getLogger("baton.vllm")
_DTYPES = ("bfloat16", "float32")  # that engines of other makes convert
_BASE = 128  # digits that a bfloat16 holds exactly


def kinds_of(config: Any, caches: Dict[str, Any], tokens: Sequence[int], shard: Shard) -> List[Kind]:
    """Of each layer, whose blocks hold so many tokens. "whole" says why a block cannot be cut, and goes to such as are
    like it, of as many ranks where each holds other heads."""
    out: List[Kind] = []
    seen: Dict[Any, Kind] = {}
    for (name, cache), block_tokens in zip(caches.items(), tokens):
        shape = str(cache.dtype), tuple(cache.shape[1:]), cache.stride(), block_tokens
        if shape not in seen:
            said = {"block_tokens": block_tokens, "bytes": cache[0].numel() * cache.element_size()}
            try:
                layer = config.compilation_config.static_forward_context[name]
                said.update(_places(layer, cache, block_tokens, shard))
                seen[shape] = Kind(said)
            except Exception as why:  # its blocks go whole
                log.info("blocks of %s and its like cannot be cut: %s", name, why)
                each = "the same of every rank" if shard.heads == 1 else f"of one of {shard.ranks} ranks"
                seen[shape] = Kind({**said, "whole": f"{block_tokens} tokens, {each}"})
        out.append(seen[shape])
    return out


def _places(layer: Any, cache: Any, tokens: int, shard: Shard) -> Dict[str, Any]:
    heads, size, dtype = layer.num_kv_heads, layer.head_size, str(cache.dtype).rpartition(".")[2]
    if dtype not in BYTES:
        raise ValueError(f"it is of {dtype}")
    if cache[0].numel() != 2 * tokens * heads * size:
        raise ValueError(f"a block of {tuple(cache.shape[1:])} is not K and V of {tokens} tokens")
    total = heads * min(shard.ranks, shard.heads)
    places = places_of(lambda *what: layer.impl.do_kv_cache_update(layer, *what), cache, tokens, heads, size)
    return {"heads": heads, "total_heads": total, "first_head": held(total, shard.ranks, shard.rank)[0],
            "head_size": size, "dtype": dtype, **places}


def kv_of(names: Sequence[str], kinds: Sequence[Kind], groups: Sequence[Group]) -> Union[Dict[str, Any], str]:
    """What engine/handoff/foreign_layout.h reads, or why it cannot."""
    kind, numbers = kinds[0].said, [[int(part) for part in name.split(".") if part.isdigit()] for name in names]
    if len(groups) != 1 or groups[0].window:
        return "its layers have windows, or are in several groups"
    if any(each.said != kind for each in kinds) or "key" not in kind:
        return "its layers differ, or their blocks cannot be looked into"
    if kind["dtype"] not in _DTYPES:
        return f"it is of {kind['dtype']}"
    if any(len(each) != 1 for each in numbers):  # as model.layers.7.self_attn.attn has one
        return "its layers have no numbers"
    return {**{key: value for key, value in kind.items() if key not in ("total_heads", "first_head", "whole")},
            "layers": [number for number, in numbers]}


def places_of(write: Any, cache: Any, tokens: int, heads: int, size: int) -> Dict[str, Any]:
    """`write` puts K and V, [tokens][heads][size] each, into a block that is like one of `cache`'s."""
    import torch

    count = tokens * heads * size
    numbers, rest = torch.zeros(2 * count, dtype=torch.long), torch.arange(count)
    for power in range(4):
        block = torch.empty_strided((1, *cache.shape[1:]), cache.stride(), dtype=cache.dtype).zero_()
        key = (rest % _BASE + 1).to(cache.dtype).view(tokens, heads, size)
        write(key, -key, block, torch.arange(tokens))
        found = torch.as_strided(block, (2 * count,), (1,)).long()
        numbers += (found.abs() - 1) * _BASE ** power
        rest = rest // _BASE
    out = {}
    for what, mine in (("key", found > 0), ("value", found < 0)):
        at = torch.full((count,), -1)
        at[numbers[mine]] = mine.nonzero()[:, 0]
        at = at.view(tokens, heads, size)
        axes = [at[:, 0, 0], at[0, :, 0], at[0, 0, :]]
        start = int(at[0, 0, 0])
        if int(mine.sum()) != count or not torch.equal(
                at, axes[0][:, None, None] + axes[1][None, :, None] + axes[2] - 2 * start):
            raise ValueError("a block of it is packed in a way that has no steps")
        out[what] = {"start": start, **{axis: levels((places - start).tolist()) for axis, places in
                                        zip(("tokens", "heads", "elements"), axes)}}
    return out


def levels(places: List[int]) -> List[List[int]]:
    """(count, stride), the innermost first, that count like this; it begins with 0."""
    out, counted = [], [0]
    while len(counted) < len(places):
        stride, left = places[len(counted)], len(places) // len(counted)
        count = next((n for n in range(left, 1, -1) if left % n == 0 and
                      all(places[i * len(counted)] == i * stride for i in range(n))), left)
        out.append([count, stride])
        counted = [base + i * stride for i in range(count) for base in counted]
    if counted != places:
        raise ValueError("a block of it is packed in a way that has no steps")
    return out
