"""Where the blocks of an engine's KV cache lie, and how one is packed: for each layer a run of bytes per block, at equal
steps. Layers of two groups may lie in the same bytes: a block belongs to one group at a time."""
from __future__ import annotations

import ctypes
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from ..kv import KvLayout

Packing = Dict[str, Any]  # as KvLayout.add_packed() takes it


class Run(NamedTuple):
    """Blocks of a request in one group of layers: ids[i] is its block number first + i."""

    first: int
    ids: List[int]


class Layer(NamedTuple):
    """`blocks` runs of `bytes` bytes, the first at `address`, each `stride` bytes after the one before."""

    address: int
    bytes: int
    stride: int
    blocks: int
    packing: Packing

    @property
    def tokens(self) -> int:
        """In a block."""
        return int(self.packing["block_tokens"])

    def row(self) -> Tuple[int, int, int, int, int]:
        """As workers tell each other."""
        return self.address, self.bytes, 0, self.stride, self.blocks

    @classmethod
    def of_row(cls, row: Sequence[int], packing: Packing) -> "Layer":
        address, size, _, stride, blocks = row
        return cls(address, size, stride, blocks, packing)

    def span(self) -> Tuple[int, int, int]:
        return self.address, self.stride * (self.blocks - 1) + self.bytes, 0

    def layout(self, model: str) -> KvLayout:
        """Of this layer, for plans."""
        return KvLayout(model).add_packed([self.span()], self.packing, blocks=self.blocks, block_stride=self.stride)

    def block(self, number: int) -> Any:
        """A copy of its current bytes."""
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
        """What packings_in() reads: each packing once."""
        kinds: List[Packing] = []
        for layer in self.layers:
            if layer.packing not in kinds:
                kinds.append(layer.packing)
        return {"kinds": kinds, "layers": [kinds.index(layer.packing) for layer in self.layers]}

    @staticmethod
    def of_tensors(caches: Dict[str, Any], packings: Sequence[Packing], groups: Iterable[int] = ()) -> "KvMemory":
        """Of tensors whose first dimension counts blocks."""
        layers, ranges = [], []
        for packing, (name, tensor) in zip(packings, caches.items()):
            if tensor.device.type != "cpu":
                raise NotImplementedError(f"{name} lies on {tensor.device}: this connector moves host memory")
            size = tensor.element_size()
            if not _is_one_run(tensor[0]):
                raise NotImplementedError(f"{name}: a block of it is not one run of bytes; choose another KV layout")
            layers.append(Layer(tensor.data_ptr(), tensor[0].numel() * size, tensor.stride(0) * size, tensor.shape[0],
                                packing))
            storage = tensor.untyped_storage()
            ranges.append((storage.data_ptr(), storage.nbytes()))
        return KvMemory(layers, ranges, list(caches.values()), groups)


def packings_in(message: Dict[str, Any]) -> Optional[List[Packing]]:
    """Of each layer of a peer's, as it says; None: it does not, and takes and gives whole blocks."""
    return [message["kinds"][number] for number in message["layers"]] if "kinds" in message else None


def _is_one_run(block: Any) -> bool:
    """Whether the elements of a tensor fill a run of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(block.stride(), block.shape)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
