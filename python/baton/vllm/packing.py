"""How kernels pack a block of this engine's cache: for plans, and for an engine of another make that converts blocks
(Baton's own server). vLLM does not say it: a layer writes numbered K and V into a block of its own, and where they are
found is the answer."""
from __future__ import annotations

import logging
from typing import Any, Dict, List, Sequence, Union

from ..kv import KvLayout, find_packing, shard_heads
from ..hand_off import Packing, Shard
from .groups import Group

log = logging.getLogger("baton.vllm")
_DTYPES = ("bfloat16", "float16", "float32")
_CONVERTED = ("bfloat16", "float32")  # by engines of other makes


def packings_of(config: Any, caches: Dict[str, Any], tokens: Sequence[int], shard: Shard) -> List[Packing]:
    """Of each layer, whose blocks hold so many tokens. "whole" says why a block cannot be cut, and goes to such as are
    like it, of as many ranks where each holds other heads."""
    out: List[Packing] = []
    seen: Dict[Any, Packing] = {}
    for (name, cache), block_tokens in zip(caches.items(), tokens):
        shape = str(cache.dtype), tuple(cache.shape[1:]), cache.stride(), block_tokens
        if shape not in seen:
            said = {"block_tokens": block_tokens, "bytes": cache[0].numel() * cache.element_size()}
            try:
                layer = config.compilation_config.static_forward_context[name]
                seen[shape] = {**said, **_places(layer, cache, block_tokens, shard)}
                KvLayout("any").add_packed([(0, said["bytes"], 0)], seen[shape], blocks=1)
            except Exception as why:  # its blocks go whole
                log.info("blocks of %s and its like cannot be cut: %s", name, why)
                each = "the same of every rank" if shard.heads == 1 else f"of one of {shard.ranks} ranks"
                seen[shape] = {**said, "whole": f"{block_tokens} tokens, {each}"}
        out.append(seen[shape])
    return out


def _places(layer: Any, cache: Any, tokens: int, shard: Shard) -> Packing:
    import torch

    heads, size, dtype = layer.num_kv_heads, layer.head_size, str(cache.dtype).rpartition(".")[2]
    if dtype not in _DTYPES:
        raise ValueError(f"it is of {dtype}")
    if cache[0].numel() != 2 * tokens * heads * size:
        raise ValueError(f"a block of {tuple(cache.shape[1:])} is not K and V of {tokens} tokens")

    def write(*key_and_value: List[int]) -> List[int]:
        key, value = (torch.tensor(each, dtype=cache.dtype).view(tokens, heads, size) for each in key_and_value)
        block = torch.empty_strided((1, *cache.shape[1:]), cache.stride(), dtype=cache.dtype).zero_()
        layer.impl.do_kv_cache_update(layer, key, value, block, torch.arange(tokens))
        return torch.as_strided(block, (cache[0].numel(),), (1,)).long().tolist()

    total = heads * min(shard.ranks, shard.heads)
    return {"heads": heads, "total_heads": total, "first_head": shard_heads(total, shard.ranks, shard.rank).start,
            "head_size": size, "dtype": dtype, **find_packing(write, block_tokens=tokens, heads=heads, head_size=size)}


def kv_of(names: Sequence[str], packings: Sequence[Packing], groups: Sequence[Group]) -> Union[Dict[str, Any], str]:
    """What engine/handoff/foreign_layout.h reads, or why it cannot."""
    first, numbers = packings[0], [[int(part) for part in name.split(".") if part.isdigit()] for name in names]
    if len(groups) != 1 or groups[0].window:
        return "its layers have windows, or are in several groups"
    if any(each != first for each in packings) or "key" not in first:
        return "its layers differ, or their blocks cannot be looked into"
    if first["dtype"] not in _CONVERTED:
        return f"it is of {first['dtype']}"
    if any(len(each) != 1 for each in numbers):  # as model.layers.7.self_attn.attn has one
        return "its layers have no numbers"
    return {**{key: value for key, value in first.items() if key not in ("total_heads", "first_head")},
            "layers": [number for number, in numbers]}
