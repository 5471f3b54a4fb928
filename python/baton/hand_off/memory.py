"""Where the blocks of an engine's KV cache lie, and how one is packed: for each layer a run of bytes per block, at equal
steps. Layers of two groups may lie in the same bytes: a block belongs to one group at a time."""
from __future__ import annotations

from typing import Any, Dict, Iterable, List, NamedTuple, Sequence, Tuple

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
        """As the library takes it, and workers tell each other: each packing once."""
        kinds: List[Packing] = []
        for layer in self.layers:
            if layer.packing not in kinds:
                kinds.append(layer.packing)
        return {"rows": [(layer.address, layer.bytes, 0, layer.stride, layer.blocks) for layer in self.layers],
                "kinds": kinds, "layers": [kinds.index(layer.packing) for layer in self.layers], "groups": self.groups}

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


def _is_one_run(block: Any) -> bool:
    """Whether the elements of a tensor fill a run of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(block.stride(), block.shape)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
