"""Groups of layers that share blocks, and the blocks of a prompt in each group. vLLM gives layers with full attention
and layers with a sliding window block tables of their own; a block that leaves the window is taken from its request,
and its KV is lost."""
from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence

from ..hand_off import Run

_GONE = 0  # vLLM's null block stands for one that its request does not have any more
_FULL, _WINDOW = ("FullAttentionSpec", "MLAAttentionSpec"), ("SlidingWindowSpec",)


class Group(NamedTuple):
    """`window`: how many tokens its layers look back at, the present one with them; None: at all. `layers`: their
    names; None: all."""

    block_size: int
    window: Optional[int] = None
    layers: Optional[Sequence[str]] = None

    def count(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def needed(self, prompt: int) -> int:
        """The first block that is looked back at from a prompt's last token, which decode computes itself. Prefill has
        all from there on until it has computed the prompt. Then it loses the first one if the next token does not look
        back at it: decode reads that all the same, and its checksum says whether another request has it by then."""
        return max(0, prompt - self.window) // self.block_size if self.window else 0


def there(ids: Sequence[int], first: int, end: int) -> Run:
    """Of a request's blocks those from number `first` up to `end` that exist: a tail of them."""
    while first < min(end, len(ids)) and ids[first] == _GONE:
        first += 1
    return Run(first, list(ids[first:end]))


def groups_of(config: Any, block_size: int) -> List[Group]:
    """The groups of vLLM's KVCacheConfig. ValueError names the kind of cache that this connector cannot move."""
    found = []
    for group in getattr(config, "kv_cache_groups", None) or ():
        spec = group.kv_cache_spec
        # Layers of one kind whose blocks differ in size are a group, too.
        specs = list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]
        windows = {getattr(each, "sliding_window", None) if type(each).__name__ in _WINDOW else None for each in specs}
        unknown = sorted({type(each).__name__ for each in specs} - {*_FULL, *_WINDOW})
        if unknown or len(windows) > 1 or not getattr(group, "enable_kv_transfer", True):
            raise ValueError("BatonConnector moves the KV of full attention and of sliding windows, not that of "
                             f"{', '.join(group.layer_names)} ({', '.join(unknown) or type(spec).__name__})")
        found.append(Group(spec.block_size, windows.pop(), list(group.layer_names)))
    return found or [Group(block_size)]
