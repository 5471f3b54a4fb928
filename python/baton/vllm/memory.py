"""Where the blocks of an engine's KV cache lie: for each layer one run of bytes per block, at equal steps. Layers of two
groups may lie in the same bytes: a block belongs to one group at a time."""
from __future__ import annotations

import ctypes
import itertools
import zlib
from typing import Any, Dict, Iterable, List, NamedTuple, Sequence, Tuple

Row = Tuple[int, int, int, int, int]


class Layer(NamedTuple):
    """`blocks` runs of `bytes` bytes, the first at `address`, each `stride` bytes after the one before."""

    address: int
    bytes: int
    stride: int
    blocks: int


def starts_of(rows: Iterable[Row]) -> List[int]:
    """Where each layer begins in a list prepared of these rows: block b of layer l is item starts[l] + b. One more for
    the end."""
    return [0, *itertools.accumulate(row[4] for row in rows)]


class KvMemory:
    """The cache of one worker. `ranges`: the (address, bytes) that hold it; `keep`: whom they belong to; `groups`: of
    each layer, the number of its group."""

    def __init__(self, layers: Iterable[Sequence[int]], ranges: Iterable[Tuple[int, int]] = (),
                 keep: Any = None, groups: Iterable[int] = ()) -> None:
        self.layers = [Layer(*map(int, layer)) for layer in layers]
        self.groups = list(groups) or [0] * len(self.layers)
        self.starts = starts_of(self.rows())
        self.ranges = sorted(set(ranges))
        self.keep = keep
        if not self.layers:
            raise ValueError("a KV cache has at least one layer")

    @staticmethod
    def of_tensors(caches: Dict[str, Any], groups: Iterable[int] = ()) -> "KvMemory":
        """Of tensors whose first dimension counts blocks."""
        layers, ranges = [], []
        for name, tensor in caches.items():
            if tensor.device.type != "cpu":
                raise NotImplementedError(f"{name} lies on {tensor.device}: this connector moves host memory")
            size = tensor.element_size()
            block = tensor[0].numel() * size
            if not _is_one_run(tensor[0]):
                raise NotImplementedError(f"{name}: a block of it is not one run of bytes; choose another KV layout")
            layers.append((tensor.data_ptr(), block, tensor.stride(0) * size, tensor.shape[0]))
            storage = tensor.untyped_storage()
            ranges.append((storage.data_ptr(), storage.nbytes()))
        return KvMemory(layers, ranges, list(caches.values()), groups)

    def rows(self) -> List[Row]:
        """For Agent.prepare(): one row a layer, so that a block is index(layer, block)."""
        return [(layer.address, layer.bytes, 0, layer.stride, layer.blocks) for layer in self.layers]

    def index(self, layer: int, block: int) -> int:
        return self.starts[layer] + block

    def crc(self, layer: int, block: int) -> int:
        """The checksum of a block's bytes in a layer, as they are now."""
        at = self.layers[layer]
        if not 0 <= block < at.blocks:
            raise IndexError(f"block {block} of {at.blocks}")
        return zlib.crc32((ctypes.c_char * at.bytes).from_address(at.address + block * at.stride))


def _is_one_run(block: Any) -> bool:
    """Whether the elements of a tensor fill a run of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(block.stride(), block.shape)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
