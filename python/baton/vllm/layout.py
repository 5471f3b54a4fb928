"""Where K and V lie in a block of this engine's cache, for an engine of another make that converts them (Baton's own
server). Kernels pack blocks as their processor likes it, and nothing here knows how: a layer writes numbered K and V
into a block of its own, and where they are found is the answer."""
from __future__ import annotations

import logging
from typing import Any, Dict, List, Sequence, Union

from .groups import Group

log = logging.getLogger("baton.vllm")
_DTYPES = ("bfloat16", "float32")
_BASE = 128  # digits that a bfloat16 holds exactly


def kv_of(config: Any, caches: Dict[str, Any], groups: Sequence[Group]) -> Union[Dict[str, Any], str]:
    """What engine/handoff/foreign_layout.h reads, or why blocks cannot be said so."""
    try:
        return _kv_of(config, caches, groups)
    except Exception as why:  # it is for pairs with others alone
        log.info("this cache is for engines of vLLM's alone: %s", why)
        return str(why)


def _kv_of(config: Any, caches: Dict[str, Any], groups: Sequence[Group]) -> Dict[str, Any]:
    name, cache = next(iter(caches.items()))
    dtype = str(cache.dtype).rpartition(".")[2]
    if len(groups) != 1 or groups[0].window:
        raise ValueError("its layers have windows, or are in several groups")
    if dtype not in _DTYPES:
        raise ValueError(f"it is of {dtype}")
    if any((each.shape, each.stride(), each.dtype) != (cache.shape, cache.stride(), cache.dtype)
           for each in caches.values()):
        raise ValueError("its layers differ")
    layer, tokens = config.compilation_config.static_forward_context[name], groups[0].block_size
    heads, size = layer.num_kv_heads, layer.head_size
    if cache[0].numel() != 2 * tokens * heads * size:
        raise ValueError(f"a block of {tuple(cache.shape[1:])} is not K and V of {tokens} tokens")
    places = places_of(lambda key, value, block, slots: layer.impl.do_kv_cache_update(layer, key, value, block, slots),
                       cache, tokens, heads, size)
    return {"block_tokens": tokens, "heads": heads, "head_size": size, "dtype": dtype,
            "bytes": cache[0].numel() * cache.element_size(), "layers": [_number(each) for each in caches], **places}


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


def _number(layer: str) -> int:
    """Of a layer in the model, by its name: model.layers.7.self_attn.attn."""
    numbers = [int(part) for part in layer.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise ValueError(f"{layer} has no number")
    return numbers[0]
