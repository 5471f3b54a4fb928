"""Where the blocks of an engine's KV cache lie, and what is in one: for each layer a run of bytes per block, at equal
steps. Layers of two groups may lie in the same bytes: a block belongs to one group at a time."""
from __future__ import annotations

import ctypes
import math
import zlib
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from ..buffers import DRAM, Memory, View
from ..kv import KvLayout, KvModel

MOST_RUNS = 256  # of a tile, that anybody is believed
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class Cut(NamedTuple):
    """How a worker's blocks are cut for another whose blocks are other ones: so many tokens of some of its heads have a
    checksum."""

    tokens: int
    heads: slice


class Kind:
    """What is in a block, as `said` (layout.py): where its K and V lie; or "whole", why that cannot be said. Kernels
    with tiles keep `tile` tokens of some elements in one run: plans move these runs, as if each were a row of one token,
    and the runs beside each other layers. `rows`: where K and V begin, and their counts and steps in bytes, as
    [run][tile][head][number]."""

    def __init__(self, said: Dict[str, Any]) -> None:
        self.said, self.tokens, self.bytes = said, said["block_tokens"], said["bytes"]
        self.format = said.get("whole", "")
        self.tile, self.heads, self.dtype, self.size = 1, range(1), "uint8", 1
        self.rows: Dict[str, Tuple[int, Tuple[int, ...], Tuple[int, ...]]] = {}
        if self.format:
            self.rows["opaque"] = 0, (1, 1, self.bytes), (0, self.bytes, 1)
            return
        self.dtype, self.size = said["dtype"], BYTES[said["dtype"]]
        self.heads = range(said["first_head"], said["first_head"] + said["heads"])
        self.tile = max(math.prod(count for count, _ in said[role]["tokens"][:-1]) for role in ("key", "value"))
        runs = {role: _runs_of(said[role], self.tile) for role in ("key", "value")}
        count = max(many for _, many, *_ in runs.values())
        if count > MOST_RUNS:
            raise ValueError(f"tiles of {count} runs")
        for role, (token, many, step, width, element, inside) in runs.items():
            if many == 1:  # cut as the other is
                step = width = width // count
            elif many != count:
                raise ValueError("K and V are tiled in two ways")
            head = said[role]["heads"][0][1] if said[role]["heads"] else 0
            self.format += inside
            self.rows[role] = (said[role]["start"] * self.size, (count, self.tokens // self.tile, len(self.heads), width),
                               tuple(each * self.size for each in (step, token, head, element)))

    def cut_for(self, other: "Kind") -> Optional[Cut]:
        """None: blocks go whole. Whether they can go at all the plan says."""
        if self.said == other.said or self.format != other.format or "whole" in self.said:
            return None
        first, end = max(self.heads[0], other.heads[0]), min(self.heads[-1], other.heads[-1]) + 1
        return Cut(math.gcd(self.tokens, other.tokens), slice(first - self.heads[0], end - self.heads[0]))

    def crc(self, block: Any, cut: Optional[Cut] = None, token: int = 0) -> int:
        """The checksum of a block's bytes; of a cut of it, from a token on, whatever order they have in their block."""
        if cut is None:
            return zlib.crc32(block)
        import numpy
        out, tiles = 0, slice(token // self.tile, (token + cut.tokens) // self.tile)
        for start, shape, steps in self.rows.values():
            numbers = numpy.ndarray(shape, f"u{self.size}", block, start, steps)
            out = zlib.crc32(numbers[:, tiles, cut.heads].tobytes(), out)
        return out


def _runs_of(said: Dict[str, Any], tile: int) -> Tuple[int, int, int, int, int, str]:
    """K or V of a head: the step to the next tile of tokens; how many runs a tile has, and the step to the next one; how
    wide they are, and the step from one number of them to the next; and what is inside, for who must have the same."""
    inside, outside, elements, got = [], said["tokens"], said["elements"], 1
    while got < tile:
        (count, step), *outside = outside
        left = tile // got
        inside.append((min(count, left), step))
        got *= min(count, left)
        if tile % got:
            raise ValueError("K and V are tiled in two ways")
        outside = [(count // left, step * left), *outside] if count > left else outside
    token = outside[0][1] if outside else 0
    if tile == 1 and len(elements) < 2:
        count, step = elements[0] if elements else (1, 1)
        return token, 1, 0, count, step, ""
    levels, run = sorted([*inside, *map(tuple, elements)], key=lambda level: level[1]), 1
    while levels and levels[0][1] == run:
        run *= levels.pop(0)[0]
    if len(levels) > 1:
        raise ValueError("a tile is in more than one run")
    many, step = levels[0] if levels else (1, 0)
    return token, many, step, run, 1, f"{inside}{elements[:-1]}"


def kinds_in(message: Dict[str, Any]) -> Optional[List[Kind]]:
    """Of each layer of a peer's, as it says; None: it does not, and takes and gives whole blocks."""
    if "kinds" not in message:
        return None
    kinds = [Kind(said) for said in message["kinds"]]
    return [kinds[number] for number in message["layers"]]


class Layer(NamedTuple):
    """`blocks` runs of `bytes` bytes, the first at `address`, each `stride` bytes after the one before."""

    address: int
    bytes: int
    stride: int
    blocks: int
    kind: Any

    def row(self) -> Tuple[int, int, int, int, int]:
        """As workers tell each other."""
        return self.address, self.bytes, 0, self.stride, self.blocks

    def span(self) -> Tuple[int, int, int]:
        return self.address, self.stride * (self.blocks - 1) + self.bytes, 0

    def layout(self, model: str) -> KvLayout:
        """Of this layer, for plans."""
        kind = self.kind
        views = {role: [View(Memory(self.address + start + run * step, 0, 0, None, DRAM), (self.blocks, *shape),
                             (self.stride, *steps), kind.dtype, kind.size) for run in range(count)]
                 for role, (start, (count, *shape), (step, *steps)) in kind.rows.items()}
        heads = {} if "whole" in kind.said else {"total_heads": kind.said["total_heads"], "first_head": kind.heads[0]}
        return KvLayout(KvModel(model, format=kind.format)).add_views(
            views, buffers=[self.span()],
            block_tokens=kind.tokens // kind.tile, **heads)

    def block(self, number: int) -> Any:
        """Its bytes, as they are now."""
        if not 0 <= number < self.blocks:
            raise IndexError(f"block {number} of {self.blocks}")
        return (ctypes.c_char * self.bytes).from_address(self.address + number * self.stride)


class KvMemory:
    """The cache of one worker. `ranges`: the (address, bytes) that hold it; `keep`: whom they belong to; `groups`: of
    each layer, the number of its group."""

    def __init__(self, layers: Iterable[Layer], ranges: Iterable[Tuple[int, int]] = (), keep: Any = None,
                 groups: Iterable[int] = ()) -> None:
        self.layers: List[Layer] = list(layers)
        self.groups = list(groups) or [0] * len(self.layers)
        self.ranges = sorted(set(ranges))
        self.keep = keep
        if not self.layers:
            raise ValueError("a KV cache has at least one layer")

    def said(self) -> Dict[str, Any]:
        """What kinds_in() reads."""
        kinds: List[Dict[str, Any]] = []
        for layer in self.layers:
            if layer.kind.said not in kinds:
                kinds.append(layer.kind.said)
        return {"kinds": kinds, "layers": [kinds.index(layer.kind.said) for layer in self.layers]}

    @staticmethod
    def of_tensors(caches: Dict[str, Any], kinds: Sequence[Kind], groups: Iterable[int] = ()) -> "KvMemory":
        """Of tensors whose first dimension counts blocks."""
        layers, ranges = [], []
        for kind, (name, tensor) in zip(kinds, caches.items()):
            if tensor.device.type != "cpu":
                raise NotImplementedError(f"{name} lies on {tensor.device}: this connector moves host memory")
            size = tensor.element_size()
            if not _is_one_run(tensor[0]):
                raise NotImplementedError(f"{name}: a block of it is not one run of bytes; choose another KV layout")
            layers.append(Layer(tensor.data_ptr(), tensor[0].numel() * size, tensor.stride(0) * size, tensor.shape[0],
                                kind))
            storage = tensor.untyped_storage()
            ranges.append((storage.data_ptr(), storage.nbytes()))
        return KvMemory(layers, ranges, list(caches.values()), groups)


def _is_one_run(block: Any) -> bool:
    """Whether the elements of a tensor fill a run of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(block.stride(), block.shape)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
