"""Paged KV caches that are laid out differently: what lies where in one (KvLayout), and what moves between two (KvPlan).

    mine = baton.KvLayout("sha256:...").add_paged(tensors, blocks=4096, block_tokens=16, heads=4, total_heads=8,
                                                  first_head=4, head_size=128, dtype="bfloat16")
    agent.register(*tensors)
    send(agent.metadata(), mine.encode())                 # to the other engine, which does the same
    prefill, theirs = agent.add_remote(metadata), baton.KvLayout.decode(layout)
    plan = baton.KvPlan(agent, baton.READ, mine, prefill, theirs)            # once for each pair of engines
    with plan.post([3, 1, 8], [7, 8], tokens=40, message=b"request 5") as transfer:
        await transfer                                                       # or: transfer.wait(timeout=5)

Tensor-parallel degrees, block sizes, orders (NHD, HND), whether K and V lie together, and the shape of tensors may
differ. The model may not, nor the type of K and V. Heads are counted through the model: an engine of tensor-parallel
rank 1 of 2 of a model with 8 KV heads has `heads` 4, `first_head` 4, `total_heads` 8. All calls may come from any
thread, but a layout is built by one. Layouts and plans are numbers: they keep no memory alive, and a layout
no agent; a plan has its agent (`agent`).
"""
from __future__ import annotations

import array
import ctypes
import json
import operator
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, NoReturn, Optional, Sequence, Tuple, Union

from . import _library
from ._library import call, lib, take
from .agent import Agent, Name, Transfer, _bytes, _name, _op, _text, _within as _bounded
from .buffers import indices_of, memory_of, rows_of, view_of
from .errors import InvalidParamError, NotFoundError

_ROLES = ("opaque", "key", "value", "latent", "rope_key", "key_scale", "value_scale", "latent_scale")
_DTYPES = {"bytes": (1, 1), "uint8": (1, 1), "int8": (2, 1), "float8_e4m3": (3, 1), "float8_e4m3fn": (3, 1),
           "float8_e5m2": (4, 1), "float16": (5, 2), "bfloat16": (6, 2), "float32": (7, 4)}  # number, bytes
_ORDERS, _PAIRS = ("NHD", "HND"), ("split", "stacked", "in_block", "joined")
_ALL_TOKENS, _ALL_LAYERS = 2 ** 64 - 1, 2 ** 32 - 1

Blocks = Union[Sequence[int], Sequence[Sequence[int]], Any]
Layers = Union[None, int, Sequence[int]]


class KvModel(NamedTuple):
    """The model that computes the KV. A plan needs two layouts whose models are equal in every field. `weights`: a
    hash over weights and config (baton.weights.weights_digest() makes one), or a name that stands for them. The other
    fields say what the hash does not cover: the type in which K and V are computed, the rotary embedding, what bytes
    mean beyond roles and types. Up to 128 bytes each."""

    weights: str
    dtype: str = ""
    rope: str = ""
    format: str = ""


class KvGroup(NamedTuple):
    """Layers that share block tables; `window`: only so many of the last tokens are kept, 0: all."""

    layers: Tuple[int, ...]
    blocks: int
    block_tokens: int
    window: int
    total_heads: int
    first_head: int
    heads: int


class KvShare(NamedTuple):
    """Selects the sender if several engines hold the same heads: the plan's source is number `rank` of `ranks` that
    split the heads in the usual way. Among the holders of one head `turn` (a request's number, for example) picks
    one."""

    ranks: int
    rank: int
    turn: int = 0


class _Owner:
    """The owner of something of the library's, which goes with it. Not before the end of the interpreter, as finalizers
    would: daemon threads may be inside a call with it then."""

    _destroy: Any = None

    def _own(self, made: ctypes.c_void_p, destroy: Any) -> ctypes.c_void_p:
        self._made, self._destroy = made, destroy
        return made

    def __del__(self) -> None:
        if self._destroy is not None:
            self._destroy(self._made)

    def __reduce__(self) -> NoReturn:  # what copies and pickles ask for
        raise TypeError(f"a {type(self).__name__} cannot be copied: make another one, or use this one in both places")


class KvLayout(_Owner):
    """The layout of an engine's cache, and its model. Each add_...() adds a group of layers that share block
    tables and returns the layout: one for most models, one for each window of a hybrid one.

    `buffers` of all three are the memory that holds the group: arrays, tensors, Memory, or (address, bytes, device); each
    must be within one range that is registered when a plan is made; of one kind, which `memory` says where they do not
    (descriptors alone are DRAM). `layers`: the model's numbers for the layers,
    ascending, or how many there are (0, 1, ...). What makes no sense is InvalidParamError, and the layout is as it was."""

    def __init__(self, model: Union[KvModel, str]) -> None:
        said = KvModel(model) if isinstance(model, str) else model
        texts = [_text(text, f"the model's {name}") for name, text in zip(KvModel._fields, said)]
        made = ctypes.c_void_p()
        call(lib.kv_layout_create, ctypes.byref(_library.KvModel(ctypes.sizeof(_library.KvModel), *texts)),
             ctypes.byref(made))
        self._layout = self._own(made, lib.kv_layout_destroy)

    def add_paged(self, buffers: Sequence[Any], *, blocks: int, block_tokens: int, heads: int, head_size: int, dtype: Any,
                  layers: Layers = None, total_heads: Optional[int] = None, first_head: int = 0, order: str = "NHD",
                  pair: str = "split", one_tensor: bool = False, window: int = 0,
                  memory: Optional[int] = None) -> "KvLayout":
        """K and V as most engines keep them, without gaps. `order` of a block: "NHD" [token][head] or "HND". `pair`:
        "split" (a tensor for K, one for V), "stacked" (one, [K or V][block]...), "in_block" ([block][K or V]...),
        "joined" (each row is K and then V). A tensor for each layer, in the order of the layers ("split": K and V of
        the first, K and V of the second, ...), or `one_tensor` for all ("split": one K's, one V's). `head_size` counts
        elements of `dtype`, which is a name ("bfloat16"), numpy's or torch's. Without `total_heads` the model has
        `heads`."""
        rows = _rows(buffers, memory)
        if layers is None and not one_tensor:
            layers = rows.count // (2 if pair == "split" else 1)
        group, keep = _group(layers, blocks, block_tokens, window, heads if total_heads is None else total_heads,
                             first_head, heads)
        paged = _library.KvPaged(ctypes.sizeof(_library.KvPaged), _within(head_size, 2 ** 32 - 1, "head_size"),
                                 _dtype(dtype)[0], _one_of(order, _ORDERS, "order"), _one_of(pair, _PAIRS, "pair"),
                                 one_tensor)
        call(lib.kv_layout_add_paged, self._layout, rows.kind, rows.address, rows.count, ctypes.byref(group),
             ctypes.byref(paged))
        del keep
        return self

    def add_latent(self, buffers: Sequence[Any], *, blocks: int, block_tokens: int, width: int, dtype: Any,
                   layers: Layers = None, window: int = 0, memory: Optional[int] = None) -> "KvLayout":
        """MLA: rows of `width` elements, [block][token], in a tensor for each layer; every rank holds the same."""
        rows = _rows(buffers, memory)
        group, keep = _group(rows.count if layers is None else layers, blocks, block_tokens, window, 1, 0, 1)
        call(lib.kv_layout_add_latent, self._layout, rows.kind, rows.address, rows.count, ctypes.byref(group),
             _within(width, 2 ** 32 - 1, "width"), _dtype(dtype)[0])
        del keep
        return self

    def add_views(self, views: Mapping[str, Sequence[Any]], *, buffers: Sequence[Any] = (), dtype: Any = None,
                  layers: Layers = None, total_heads: Optional[int] = None, first_head: int = 0,
                  window: int = 0, memory: Optional[int] = None, block_tokens: Optional[int] = None) -> "KvLayout":
        """Anything else: of each role ("key", "value", "latent", "rope_key", "key_scale", "value_scale", "latent_scale",
        "opaque") an array, tensor or View for each layer, seen as [block][token][head][element], whatever its strides;
        [block][head][element] for what a block has once (`block_tokens` says how many tokens it holds where no view has
        tokens). `buffers`: the tensors that hold them; without, each view
        stands for itself, which costs more transfers where K and V, or layers, lie side by side. `dtype`, for all roles
        or {role: dtype}, where the arrays do not say it: bfloat16 is uint16 to numpy."""
        seen = {role: [view_of(view) for view in each] for role, each in views.items()}
        every = [view for each in seen.values() for view in each]
        first = every[0] if every else None
        if first is None or any(len(view.shape) not in (3, 4) or view.shape[0] != first.shape[0] for view in every):
            raise InvalidParamError("views are [block][token][head][element] or [block][head][element], all of as many "
                                    f"blocks, not {[view.shape for view in every[:4]]}")
        rows = _rows(buffers or [view.memory for view in every], memory)
        tokens = {view.shape[1] for view in every if len(view.shape) == 4}
        if block_tokens is not None:
            tokens.add(block_tokens)
        heads = {view.shape[-2] for view in every}
        if len(tokens) > 1 or len(heads) > 1:
            raise InvalidParamError(f"views of one group have one block size and as many heads, not {sorted(tokens)} "
                                    f"tokens and {sorted(heads)} heads")
        held = heads.pop()
        count = {len(each) for each in seen.values()}
        if len(count) > 1:
            raise InvalidParamError(f"each role has a view for each layer, not {sorted(count)} of them")
        if not tokens:
            raise InvalidParamError("no view has tokens: say how many a block holds, as block_tokens")
        group, keep = _group(count.pop() if layers is None else layers, first.shape[0], tokens.pop(), window,
                             held if total_heads is None else total_heads, first_head, held)
        if any(len(each) != group.layer_count for each in seen.values()):
            raise InvalidParamError(f"views of {len(every) // len(seen)} layers, but {group.layer_count} are named")
        fields, addresses = (_library.KvField * len(seen))(), []
        for field, (role, each) in zip(fields, seen.items()):
            addresses.append(_fill(field, role, each, dtype[role] if isinstance(dtype, Mapping) else dtype))
        call(lib.kv_layout_add_fields, self._layout, rows.kind, rows.address, rows.count, ctypes.byref(group), fields,
             len(fields))
        del keep, addresses
        return self

    def add_packed(self, buffers: Sequence[Any], packing: Mapping[str, Any], *, blocks: int, block_stride: int = 0,
                   layers: Layers = None, window: int = 0, memory: Optional[int] = None) -> "KvLayout":
        """Blocks as a kernel packs them, tiles too, of `blocks` in each layer. `packing` is what engines tell each other of
        theirs, as JSON has it: kvtransfer/kv_packing.h says what is in it, and find_packing() makes most of it. `buffers`: of
        each layer its blocks, from the first to the last; `block_stride`: bytes from one to the next, 0: they are dense."""
        rows = _rows(buffers, memory)
        group, keep = _group(rows.count if layers is None else layers, blocks, 1, window, 1, 0, 1)
        call(lib.kv_layout_add_packed, self._layout, rows.kind, rows.address, rows.count, ctypes.byref(group),
             json.dumps(packing).encode(), _within(block_stride, _ALL_TOKENS, "block_stride"))
        del keep
        return self

    @property
    def groups(self) -> List[KvGroup]:
        """Of layers, in the order in which they were added. A request names blocks of each."""
        out: List[KvGroup] = []
        one = _library.KvGroup(ctypes.sizeof(_library.KvGroup))
        while True:
            try:
                call(lib.kv_layout_get_group, self._layout, len(out), ctypes.byref(one))
            except NotFoundError:
                return out
            out.append(KvGroup(tuple(one.layers[:one.layer_count]), *(getattr(one, n) for n in KvGroup._fields[1:])))

    def encode(self) -> bytes:
        """For the other engine, beside the agent's metadata. It says what lies where, and gives access to nothing."""
        out = _library.Bytes()
        call(lib.kv_layout_encode, self._layout, ctypes.byref(out))
        return take(out)

    @classmethod
    def decode(cls, data: bytes) -> "KvLayout":
        """Another engine's. MismatchError: it is damaged, or of another version."""
        made = ctypes.c_void_p()
        call(lib.kv_layout_decode, bytes(data), len(data), ctypes.byref(made))
        layout = cls.__new__(cls)
        layout._layout = layout._own(made, lib.kv_layout_destroy)
        return layout


class KvPlan(_Owner):
    """A plan of transfers between this agent's cache and another's, whose metadata is loaded: WRITE from `local` to
    `remote`, READ from there to here. Layers and heads move that both hold. MismatchError: another model, or caches
    that do not fit each other; its text says what differs and what to do. NotFoundError: no such agent, or memory of
    a layout that is not registered. Making one costs microseconds; keep it for all requests."""

    def __init__(self, agent: Agent, op: int, local: KvLayout, remote_agent: Name, remote: KvLayout, *,
                 share: Optional[KvShare] = None) -> None:
        self.agent = agent
        made, info = ctypes.c_void_p(), _library.KvPlanInfo(ctypes.sizeof(_library.KvPlanInfo))
        numbers = None if share is None else ctypes.byref(_share(share))
        agent._open.call(lib.kv_plan_create, _op(op), local._layout, _name(remote_agent), remote._layout, numbers,
                         ctypes.byref(made))
        self._plan = self._own(made, lib.kv_plan_destroy)
        call(lib.kv_plan_get_info, made, ctypes.byref(info))
        self.complete = bool(info.complete)  # the source has every layer of the target, and every head of its share
        self.layers: int = info.layers  # that move
        self.bytes_per_token: int = info.bytes_per_token  # that travel, in all of them

    def transfer(self, local_blocks: Blocks, remote_blocks: Blocks, *, tokens: Union[None, int, Tuple[int, int]] = None,
                 length: int = 0, layers: Union[None, int, Tuple[int, int]] = None,
                 local_first_block: Union[int, Sequence[int]] = 0, remote_first_block: Union[int, Sequence[int]] = 0,
                 message: bytes = b"") -> Transfer:
        """A transfer of a sequence's KV, not posted yet. `local_blocks`: the blocks of this side's cache that hold the
        sequence, in order, in blocks of this side's size; a list or an array of whole numbers, or one of these for each
        group of the layout. `remote_blocks`: the other side's, likewise. Their first is block number ..._first_block of
        the sequence, one number or one for each group.

        `tokens`: those that move: the first so many, or (first, end); None: up to where both sides have blocks. They are
        rounded outwards to what both block sizes can divide; blocks of equal size move whole. `length`: tokens of the
        whole sequence, from whose end a window counts, if these are not its last (with neither it counts from the end of
        the last block: where a group has a window, say one of the two). `layers`: the model's layers (first,
        end), one, or None for all. The message reaches the other agent when all bytes are there. Block numbers that a
        cache does not have, fewer blocks than the tokens need, and lists too many or too few are InvalidParamError."""
        mine, held = _lists(local_blocks, local_first_block)
        theirs, held_too = _lists(remote_blocks, remote_first_block)
        begin, end = tokens if isinstance(tokens, tuple) else (0, _ALL_TOKENS if tokens is None else tokens)
        first, last = layers if isinstance(layers, tuple) else (0, _ALL_LAYERS) if layers is None else (layers, layers + 1)
        request = _library.KvRequest(
            ctypes.sizeof(_library.KvRequest), _within(begin, _ALL_TOKENS, "the first token"),
            _within(end, _ALL_TOKENS, "the end of the tokens"), _within(length, _ALL_TOKENS, "length"),
            _within(first, _ALL_LAYERS, "the first layer"), _within(last, _ALL_LAYERS, "the end of the layers"),
            mine, len(mine), theirs, len(theirs))
        text = _bytes(message, "a message")
        number = self.agent._open.number_of(lib.kv_plan_make_transfer, self._plan, ctypes.byref(request), text, len(text))
        del held, held_too
        return Transfer(self.agent, number)

    def post(self, local_blocks: Blocks, remote_blocks: Blocks, **how: Any) -> Transfer:
        """The same, posted. Takes what transfer() takes."""
        return self.transfer(local_blocks, remote_blocks, **how).post()


def find_packing(write: Callable[[List[int], List[int]], Sequence[int]], *, block_tokens: int, heads: int,
                 head_size: int) -> Dict[str, Any]:
    """{"key": ..., "value": ...} of a packing, for add_packed(): where a kernel puts K and V in a block, found by looking.
    `write` has the kernel pack K and V, whole numbers as [token][head][element], into a block of zeros, and returns what
    lies at each place of the block then. It is called four times; the numbers are at most 128, which bfloat16 holds, and
    those of V are negative. InvalidParamError: a block that no such form says."""
    count = block_tokens * heads * head_size
    digits: List[Sequence[int]] = []
    for power in range(4):
        key = [number // 128 ** power % 128 + 1 for number in range(count)]
        digits.append(write(key, [-number for number in key]))
    places = [0 if not all(each) else (1 if each[0] > 0 else -1) * (1 + sum(
        (abs(digit) - 1) * 128 ** power for power, digit in enumerate(each))) for each in zip(*digits)]
    address, many, keep = indices_of(places)
    out = _library.Bytes()
    call(lib.kv_find_packing, address, many, _within(block_tokens, 2 ** 32 - 1, "block_tokens"),
         _within(heads, 2 ** 32 - 1, "heads"), _within(head_size, 2 ** 32 - 1, "head_size"), ctypes.byref(out))
    del keep
    found: Dict[str, Any] = json.loads(take(out))
    return found


def shard_heads(total_heads: int, ranks: int, rank: int) -> range:
    """The heads that number `rank` of `ranks` holds, as vLLM and Baton split them. With more ranks than heads several hold
    the same."""
    first, heads = ctypes.c_uint32(), ctypes.c_uint32()
    call(lib.kv_shard_heads, *(_within(number, 2 ** 32 - 1, "heads and ranks") for number in (total_heads, ranks, rank)),
         ctypes.byref(first), ctypes.byref(heads))
    return range(first.value, first.value + heads.value)


def ranks_heard(total_heads: int, sources: int, targets: int, rank: int) -> List[int]:
    """Of a source in `sources` ranks those that number `rank` of `targets` hears: who sends it heads (with its rank as the
    share's turn), and of those that no rank needs some, so that each hears when its blocks are free."""
    room, count = _within(sources, 512, "sources"), ctypes.c_size_t()
    out = (ctypes.c_uint32 * max(1, room))()
    call(lib.kv_ranks_heard, *(_within(number, 2 ** 32 - 1, "heads and ranks") for number in (
        total_heads, sources, targets, rank)), out, room, ctypes.byref(count))
    return out[:count.value]


def _within(number: Any, most: int, what: str) -> int:
    """Also of numpy's whole numbers, which ctypes does not take."""
    return _bounded(operator.index(number), most, what)


def _rows(buffers: Sequence[Any], memory: Optional[int]) -> Any:
    rows = rows_of([one if isinstance(one, tuple) else memory_of(one) for one in buffers], memory)
    if rows.columns != 3:
        raise InvalidParamError("buffers of a KV layout are rows of 3 numbers: (address, bytes, device)")
    return rows


def _group(layers: Layers, *numbers: int) -> Tuple[_library.KvGroup, Any]:
    if layers is None:
        raise InvalidParamError("layers is missing: how many there are, or the model's numbers for them")
    listed = range(_within(layers, 4096, "layers")) if isinstance(layers, int) else layers
    keep = (ctypes.c_uint32 * max(1, len(listed)))(*(_within(layer, 2 ** 32 - 1, "a layer") for layer in listed))
    said = [_within(number, 2 ** 32 - 1, name) for name, number in zip(KvGroup._fields[1:], numbers)]
    return _library.KvGroup(ctypes.sizeof(_library.KvGroup), keep, len(listed), *said), keep


def _fill(field: _library.KvField, role: str, views: List[Any], dtype: Any) -> "array.array[int]":
    """A field out of its views, which have to be alike. Returns what the field points at."""
    first = views[0]
    number, size = _dtype(first.dtype if dtype is None else dtype)
    if size != first.itemsize:
        raise InvalidParamError(f"{role}: elements of {first.itemsize} bytes are no {dtype or first.dtype}")
    if any(view[1:4] != first[1:4] for view in views):
        raise InvalidParamError(f"{role}: the views of all layers have one shape, one type and equal strides")
    if min(first.strides) < 0:
        raise InvalidParamError(f"{role}: strides are not negative")
    strides = list(first.strides)
    if len(strides) == 3:
        strides.insert(1, 0)
    field.role, field.dtype, field.width = _one_of(role, _ROLES, "a role") + 1, number, first.shape[-1]
    field.per_block = len(first.shape) == 3
    field.block_stride, field.token_stride, field.head_stride, field.element_stride = strides
    keep = array.array("Q", [view.memory.address for view in views])
    field.addresses = keep.buffer_info()[0]
    return keep


def _lists(blocks: Blocks, first: Union[int, Sequence[int]]) -> Tuple[Any, List[Any]]:
    """Block numbers as the library takes them, and what must live until it has."""
    nested = not hasattr(blocks, "ndim") and len(blocks) > 0 and (
        isinstance(blocks[0], (list, tuple, range)) or getattr(blocks[0], "ndim", 0) > 0)
    listed = [indices_of(each) for each in (blocks if nested else [blocks])]
    firsts: Iterable[int] = [first] * len(listed) if isinstance(first, int) else list(first)
    if len(list(firsts)) != len(listed):
        raise InvalidParamError(f"{len(list(firsts))} first blocks for {len(listed)} lists: one for each")
    out = (_library.KvBlocks * len(listed))()
    for one, (address, count, _), number in zip(out, listed, firsts):
        one.blocks, one.count, one.first_block = address, count, _within(number, _ALL_TOKENS, "a first block")
    return out, [keep for _, _, keep in listed]


def _share(share: KvShare) -> _library.KvShare:
    ranks, rank, turn = KvShare(*share)
    return _library.KvShare(ctypes.sizeof(_library.KvShare), _within(ranks, 2 ** 32 - 1, "ranks"),
                            _within(rank, 2 ** 32 - 1, "rank"), _within(turn, _ALL_TOKENS, "turn"))


def _one_of(word: str, words: Sequence[str], what: str) -> int:
    if word not in words:
        raise InvalidParamError(f"{what} is {word!r}: it is one of {', '.join(words)}")
    return words.index(word)


def _dtype(dtype: Any) -> Tuple[int, int]:
    """(number, bytes) of a name, of numpy's types, and of torch's."""
    name = getattr(dtype, "__name__", str(dtype)).rpartition(".")[2]
    if name not in _DTYPES:
        raise InvalidParamError(f"dtype is {dtype!r}: it is one of {', '.join(_DTYPES)}")
    return _DTYPES[name]
