"""The backend in Python, for where the one in C++ cannot be compiled. What torch's own glue does not let it do: is_completed() of
an asynchronous call is always False, and a receive from any rank does not say from which."""
from __future__ import annotations

import ctypes
import datetime
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from .._handle import Handle
from .._library import lib
from . import _rare
from ._flight import Flight, Work, done, requests

_KINDS = {name: number for number, name in enumerate((
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "barrier", "send", "receive",
    "all_to_all_v"))}
_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3, torch.int8: 4, torch.uint8: 5,
          torch.int32: 6, torch.int64: 7}
_NEWER = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 9, torch.uint32: 10, torch.uint64: 11}
_OPS = {getattr(dist.ReduceOp.RedOpType, name): number for name, number in (
    ("SUM", 0), ("PRODUCT", 1), ("MIN", 2), ("MAX", 3), ("AVG", 4), ("BAND", 6), ("BOR", 7), ("BXOR", 8))}
_AVG, _UNKNOWN, _BYTE, _ANY = 4, 99, 5, -1
_NO_LISTS = (0, 0, 0, 0)
_UNSET = datetime.timedelta(milliseconds=-1)


def _dense(tensor: torch.Tensor, call: str) -> torch.Tensor:
    if tensor.is_cpu and tensor.layout is torch.strided:
        return tensor
    if not tensor.is_cpu:
        raise RuntimeError(f"backend baton: {call} got a tensor on {tensor.device}, and in Python moves those of the CPU: the "
                           "compiled backend moves CUDA tensors (`python3 -m baton.torch` says why it could not be compiled), or another "
                           'backend beside this one, init_process_group("cpu:baton,cuda:nccl")')
    raise RuntimeError(f"backend baton: {call} takes dense tensors, and this one is {tensor.layout}")


class Backend(c10d.Backend):
    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(rank, size)
        self.store, self.barriers, self.calls = store, 0, 0
        self.settings = False, True
        self.comm = Handle(None, "communicator")
        self.members = b""
        # And so the memory that they use, also of works that the program has dropped: collectives, and sends and receives.
        self.flying: Dict[int, Flight] = {}
        self.messages: Dict[int, Flight] = {}
        self._options = options

    # --- the group ---
    def getBackendName(self) -> str:
        return "baton"

    def name(self) -> str:
        return "baton"

    @property
    def options(self) -> Any:
        return self._options

    @property
    def supports_splitting(self) -> bool:
        return True

    @property
    def supports_coalescing(self) -> bool:
        return False

    supports_shrinking = supports_reconfigure = supports_window = supports_abort_hooks = supports_coalescing

    def split(self, store: Any, ranks: List[int], options: Any) -> Any:
        return _rare.split(self, store, ranks, options)

    def perform_nocolor_split(self, device: Any) -> None:
        """What torch calls at ranks outside a new group, where the first was given a device."""

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._options._timeout = timeout

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        self.comm.drop(lib.comm_abort, b"the process group was aborted at this rank", None)

    def shutdown(self) -> None:
        self.comm.why = "this process group was destroyed: init_process_group() makes another one"
        self.comm.destroy()
        self.flying.clear()
        self.messages.clear()
        _alive.discard(self)

    def _get_sequence_number_for_group(self) -> int:
        return self.calls

    def _set_sequence_number_for_group(self) -> None:
        pass

    # --- starting calls ---
    def _start(self, work: Flight, kind: str, dtype: int, count: int, source: int = 0, out: int = 0, op: int = 0, peer: int = 0,
               tag: int = 0, timeout: Optional[datetime.timedelta] = None, lists: Sequence[Sequence[int]] = ()) -> None:
        given = self._options._timeout if timeout is None or timeout == _UNSET else timeout
        work.limit = int(given.total_seconds() * 1e9)
        request = requests.mine
        request.most = 200 if work.flying is self.flying else 4000  # of 256 and 4,096 that the library has
        kept = [(ctypes.c_size_t * len(one))(*one) for one in lists] if lists else None
        request.fill(_KINDS[kind], dtype, op, peer, source, out, count,
                     map(ctypes.addressof, kept) if kept else _NO_LISTS, work.limit, tag)
        work.start(request)

    def _begin(self, outputs: List[torch.Tensor]) -> Flight:
        self.calls += 1
        return Flight(self.comm, self.flying, outputs)

    @staticmethod
    def _given(work: Flight, opts: Any) -> Any:
        if opts is not None and not getattr(opts, "asyncOp", True):
            work.wait()
            return done(work.outputs)
        return Work(work)

    @staticmethod
    def _put(work: Flight, to: torch.Tensor, packed: torch.Tensor) -> None:
        work.keep.append(packed)
        if packed is not to:
            work.unpack.append(lambda: to.copy_(packed))

    @staticmethod
    def _moved(tensor: torch.Tensor) -> Any:
        """The type in which its elements move, and how many of those there are."""
        known = _TYPES.get(tensor.dtype)
        return (known, tensor.numel()) if known is not None else (_BYTE, tensor.numel() * tensor.element_size())

    @staticmethod
    def _reduced(tensor: torch.Tensor, op: Any) -> Any:
        """(type, reduction, the tensor as it is summed)"""
        dtype, number = tensor.dtype, _OPS.get(op.op, _UNKNOWN)
        kind = _TYPES.get(dtype)
        if kind is not None and number <= _AVG:
            return kind, number, tensor.contiguous()
        name = op.op.name if op.op in _OPS or op == dist.ReduceOp.PREMUL_SUM else str(op)
        if number == _UNKNOWN:
            raise RuntimeError("backend baton: ReduceOp.PREMUL_SUM is of the compiled backend" if name == "PREMUL_SUM" else
                               f"backend baton cannot reduce with {op}")
        if dtype == torch.bool and name != "AVG":
            number = {"SUM": 3, "BOR": 3, "PRODUCT": 2, "BAND": 2}.get(name, number)
            return _BYTE, number, tensor.view(torch.uint8) if tensor.is_contiguous() else tensor.to(torch.uint8)
        if dtype in (torch.int16, torch.uint16):
            tensor = tensor.to(torch.int32)
        if tensor.is_complex() and name in ("SUM", "AVG"):
            tensor = torch.view_as_real(tensor)
        kind = _TYPES.get(tensor.dtype, _NEWER.get(tensor.dtype))
        if kind is None or tensor.is_floating_point() and number > _AVG:
            raise RuntimeError(f"backend baton cannot reduce {str(dtype).replace('torch.', '')} with ReduceOp.{name}")
        return kind, number, tensor.contiguous()

    def _listed(self, tensors: Sequence[torch.Tensor], call: str) -> None:
        if len(tensors) != self.size():
            raise ValueError(f"backend baton: {call} got a list of {len(tensors)} tensors in a group of {self.size()} ranks")

    def _times(self, large: torch.Tensor, small: torch.Tensor, call: str) -> None:
        _dense(large, call), _dense(small, call)
        if large.dtype != small.dtype:
            raise RuntimeError(f"backend baton: {call} got {small.dtype} and {large.dtype}: both must have one type")
        if large.numel() != small.numel() * self.size():
            raise ValueError(f"backend baton: {call} wants one tensor to be {self.size()} times the other's size, and got "
                             f"{large.numel()} and {small.numel()} elements")

    # --- collectives ---
    def _all_reduce(self, work: Flight, tensor: torch.Tensor, opts: Any) -> None:
        kind, op, packed = self._reduced(_dense(tensor, "all_reduce"), opts.reduceOp)
        shared = packed.data_ptr() == tensor.data_ptr()
        self._put(work, tensor, tensor if shared else packed)
        if not shared and tensor.is_complex():
            work.unpack[-1] = lambda: tensor.copy_(torch.view_as_complex(packed))
        where = packed.data_ptr()
        self._start(work, "all_reduce", kind, packed.numel(), where, where, op, timeout=opts.timeout)

    def allreduce(self, tensors: List[torch.Tensor], opts: Any) -> Any:
        if tensors[0].layout == torch.sparse_coo:
            return self.allreduce_sparse(tensors, opts)
        return self.allreduce_coalesced(tensors, opts)

    def allreduce_coalesced(self, tensors: List[torch.Tensor], opts: Any) -> Any:
        work = self._begin(tensors)
        for tensor in tensors:
            self._all_reduce(work, tensor, opts)
        return self._given(work, opts)

    def allreduce_sparse(self, tensors: List[torch.Tensor], opts: Any) -> Any:
        _rare.all_reduce_sparse(self, tensors[0], opts.reduceOp)
        return done(tensors)

    def broadcast(self, tensors: List[torch.Tensor], opts: Any) -> Any:
        work, tensor = self._begin(tensors), _dense(tensors[0], "broadcast")
        packed = tensor.contiguous()
        self._put(work, tensor, packed)
        kind, count = self._moved(packed)
        self._start(work, "broadcast", kind, count, packed.data_ptr(), packed.data_ptr(), peer=opts.rootRank,
                    timeout=opts.timeout)
        return self._given(work, opts)

    def reduce(self, tensors: List[torch.Tensor], opts: Any) -> Any:
        work, tensor = self._begin(tensors), _dense(tensors[0], "reduce")
        kind, op, packed = self._reduced(tensor, opts.reduceOp)
        root = self.rank() == opts.rootRank
        if root and packed.data_ptr() != tensor.data_ptr():
            as_is = torch.view_as_complex(packed) if tensor.is_complex() else packed
            work.unpack.append(lambda: tensor.copy_(as_is))
        work.keep.append(packed)
        self._start(work, "reduce", kind, packed.numel(), packed.data_ptr(), packed.data_ptr() if root else 0, op,
                    opts.rootRank, timeout=opts.timeout)
        return self._given(work, opts)

    def _all_gather_single(self, work: Flight, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> None:
        self._times(output, tensor, "all_gather_single")
        source, out = tensor.contiguous(), output.contiguous()
        work.keep.append(source)
        self._put(work, output, out)
        kind, count = self._moved(source)
        self._start(work, "all_gather", kind, count, source.data_ptr(), out.data_ptr(), timeout=opts.timeout)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: List[torch.Tensor], tensors: List[torch.Tensor], opts: Any) -> Any:
        work = self._begin(outputs)
        for output, tensor in zip(outputs, tensors):
            self._all_gather_single(work, output, tensor, opts)
        return self._given(work, opts)

    def _all_gather(self, work: Flight, outputs: List[torch.Tensor], tensor: torch.Tensor, opts: Any) -> None:
        self._listed(outputs, "all_gather")
        if any(output.numel() != tensor.numel() for output in outputs):
            self._exchange(work, outputs, [tensor] * self.size(), "all_gather", opts)
            return
        flat = tensor.new_empty((self.size(), *tensor.shape))
        self._all_gather_single(work, flat, tensor, opts)
        work.unpack.append(lambda: [to.copy_(row.view(to.shape)) for to, row in zip(outputs, flat)])

    def allgather(self, outputs: List[List[torch.Tensor]], tensors: List[torch.Tensor], opts: Any) -> Any:
        work = self._begin(outputs[0])
        self._all_gather(work, outputs[0], _dense(tensors[0], "all_gather"), opts)
        return self._given(work, opts)

    def allgather_coalesced(self, outputs: List[List[torch.Tensor]], tensors: List[torch.Tensor], opts: Any = None) -> Any:
        opts = opts or c10d.AllgatherOptions()
        work = self._begin([output for one in outputs for output in one])
        for index, tensor in enumerate(tensors):
            self._all_gather(work, [one[index] for one in outputs], tensor, opts)
        return self._given(work, opts)

    def _reduce_scatter(self, work: Flight, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> None:
        self._times(tensor, output, "reduce_scatter_single")
        kind, op, source = self._reduced(tensor, opts.reduceOp)
        out = self._reduced(output, opts.reduceOp)[2]
        work.keep += [source, out]
        if out.data_ptr() != output.data_ptr():
            as_is = torch.view_as_complex(out) if output.is_complex() else out
            work.unpack.append(lambda: output.copy_(as_is))
        self._start(work, "reduce_scatter", kind, out.numel(), source.data_ptr(), out.data_ptr(), op, timeout=opts.timeout)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: List[torch.Tensor], tensors: List[torch.Tensor], opts: Any) -> Any:
        work = self._begin(outputs)
        for output, tensor in zip(outputs, tensors):
            self._reduce_scatter(work, output, tensor, opts)
        return self._given(work, opts)

    def reduce_scatter(self, outputs: List[torch.Tensor], tensors: List[List[torch.Tensor]], opts: Any) -> Any:
        self._listed(tensors[0], "reduce_scatter")
        return self.reduce_scatter_single(outputs[0], torch.cat([one.reshape(-1) for one in tensors[0]]), opts)

    def _exchange(self, work: Flight, outputs: List[torch.Tensor], tensors: List[torch.Tensor], call: str, opts: Any) -> None:
        """One tensor to each rank and from each, of any sizes."""
        def offsets(counts: List[int]) -> List[int]:
            return [sum(counts[:rank]) for rank in range(len(counts))]

        source = torch.cat([_dense(tensor, call).reshape(-1) for tensor in tensors])
        out = torch.empty(sum(output.numel() for output in outputs), dtype=source.dtype)
        kind, count = self._moved(source)
        each = count // source.numel() if source.numel() else 1
        in_counts = [tensor.numel() * each for tensor in tensors]
        out_counts = [_dense(output, call).numel() * each for output in outputs]
        work.keep += [source, out]
        parts = out.split([output.numel() for output in outputs])
        work.unpack.append(lambda: [to.copy_(part.view(to.shape)) for to, part in zip(outputs, parts)])
        self._start(work, "all_to_all_v", kind, 0, source.data_ptr(), out.data_ptr(), timeout=opts.timeout,
                    lists=(in_counts, offsets(in_counts), out_counts, offsets(out_counts)))

    def alltoall(self, outputs: List[torch.Tensor], tensors: List[torch.Tensor], opts: Any) -> Any:
        for one in (outputs, tensors):
            self._listed(one, "all_to_all")
        work = self._begin(outputs)
        self._exchange(work, outputs, tensors, "all_to_all", opts)
        return self._given(work, opts)

    def all_to_all_single(self, output: torch.Tensor, tensor: torch.Tensor, output_sizes: List[int], input_sizes: List[int],
                          opts: Any) -> Any:
        work, size = self._begin([output]), self.size()
        if output_sizes or input_sizes:
            def parts(whole: torch.Tensor, sizes: List[int]) -> List[torch.Tensor]:
                return list(whole.split(sizes or [whole.shape[0] // size] * size))

            self._exchange(work, parts(output, output_sizes), parts(tensor, input_sizes), "all_to_all_single", opts)
            return self._given(work, opts)
        _dense(output, "all_to_all_single"), _dense(tensor, "all_to_all_single")
        if output.numel() != tensor.numel() or tensor.numel() % size:
            raise ValueError(f"backend baton: all_to_all_single wants as many elements in as out, a multiple of the {size} ranks")
        source, out = tensor.contiguous(), output.contiguous()
        work.keep.append(source)
        self._put(work, output, out)
        kind, count = self._moved(source)
        self._start(work, "all_to_all", kind, count // size, source.data_ptr(), out.data_ptr(), timeout=opts.timeout)
        return self._given(work, opts)

    def _rooted(self, one: torch.Tensor, many: Optional[List[torch.Tensor]], root: int, call: str) -> Any:
        if not 0 <= root < self.size():
            raise ValueError(f"backend baton: {call} got root rank {root} in a group of {self.size()}")
        nothing = [one.new_empty(0)] * self.size()
        if self.rank() == root:
            self._listed(many or [], call)
        return [*nothing[:root], one, *nothing[root + 1:]], many if self.rank() == root else nothing

    def gather(self, outputs: List[List[torch.Tensor]], tensors: List[torch.Tensor], opts: Any) -> Any:
        mine, all_of_them = self._rooted(tensors[0], outputs[0] if outputs else None, opts.rootRank, "gather")
        work = self._begin(outputs[0] if outputs else [])
        self._exchange(work, all_of_them, mine, "gather", opts)
        return self._given(work, opts)

    def scatter(self, outputs: List[torch.Tensor], tensors: List[List[torch.Tensor]], opts: Any) -> Any:
        mine, all_of_them = self._rooted(outputs[0], tensors[0] if tensors else None, opts.rootRank, "scatter")
        work = self._begin(outputs)
        self._exchange(work, mine, all_of_them, "scatter", opts)
        return self._given(work, opts)

    def barrier(self, opts: Any) -> Any:
        work = self._begin([])
        self._start(work, "barrier", 0, 0, timeout=opts.timeout)
        return self._given(work, opts)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        self.barriers += 1
        _rare.monitored_barrier(self.store, self.rank(), self.size(), self.barriers, opts.timeout, wait_all_ranks)

    # --- point to point ---
    def _message(self, outputs: List[torch.Tensor]) -> Flight:
        self.calls += 1
        return Flight(self.comm, self.messages, outputs)

    def send(self, tensors: List[torch.Tensor], to: int, tag: int = 0) -> Any:
        work, packed = self._message([]), _dense(tensors[0], "send").contiguous()
        work.keep.append(packed)
        kind, count = self._moved(packed)
        self._start(work, "send", kind, count, packed.data_ptr(), peer=to, tag=tag)
        return Work(work)

    def recv(self, tensors: List[torch.Tensor], source: int, tag: int = 0) -> Any:
        work, tensor = self._message(tensors), _dense(tensors[0], "recv")
        packed = tensor.contiguous()
        self._put(work, tensor, packed)
        kind, count = self._moved(packed)
        self._start(work, "receive", kind, count, out=packed.data_ptr(), peer=source, tag=tag)
        return Work(work)

    def recv_anysource(self, tensors: List[torch.Tensor], tag: int = 0) -> Any:
        return self.recv(tensors, _ANY, tag)


_alive: "set[Backend]" = set()  # torch itself keeps the C++ half of a group's backend alone


def make(store: Any, rank: int, size: int, options: Any, ordered: bool, tune: bool) -> Backend:
    backend = Backend(store, rank, size, options)
    backend.settings = ordered, tune
    _alive.add(backend)
    return backend


def adopt(backend: Backend, comm: int, members: bytes, rank: int, size: int) -> None:
    backend.comm.destroy()
    backend.comm, backend.members = Handle(comm, "communicator"), members


def members(backend: Any) -> bytes:
    return getattr(backend, "members", b"")


def address(backend: Backend) -> int:
    return backend.comm.value or 0


def settings(backend: Backend) -> Tuple[bool, bool]:
    return backend.settings


def use(endpoint: int) -> None:
    pass
