"""What a tier of vLLM's derives from and is handed, in vLLM's place (0.32: vllm/v1/kv_offload/base.py, config.py and
tiering/base.py). with_vllm_test.py holds the tier against the real ones where they are installed."""
import dataclasses
import enum
import sys
import types
from typing import Any, Collection, Optional


class LookupResult(enum.Enum):
    MISS = enum.auto()
    HIT = enum.auto()
    HIT_PENDING = enum.auto()
    RETRY = enum.auto()


class Locality(enum.Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


class RequestOffloadingContext:
    pass


@dataclasses.dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Optional[Collection[bytes]] = None
    transfer_time: Optional[float] = None
    transfer_bytes: Optional[int] = None


class SecondaryTierManager:
    def __init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None):
        self._primary_kv_view = primary_kv_view
        self._block_size_bytes = primary_kv_view.strides[0]
        self.tier_type, self.locality, self._bp_detector = tier_type, None, backpressure_detector

    @property
    def block_size_bytes(self):
        return self._block_size_bytes


@dataclasses.dataclass(frozen=True)
class Group:
    tokens_per_block: int = 16
    layer_names: tuple = ("a", "b")
    group_id: int = 0


@dataclasses.dataclass(frozen=True)
class Model:
    name: str = "org/model"
    dtype: str = "bfloat16"


@dataclasses.dataclass(frozen=True)
class Cache:
    tokens_per_hash: int = 16
    blocks_per_chunk: int = 1


@dataclasses.dataclass(frozen=True)
class Parallel:
    rank: int = 0
    world_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    data_parallel_index: int = 0
    data_parallel_size: int = 1


@dataclasses.dataclass(frozen=True)
class Config:
    groups: tuple = (Group(),)
    worker_kv_bytes_per_block: int = 4096
    engine_id: str = "engine"
    model: Any = Model()
    cache: Any = Cache()
    parallel: Any = Parallel()
    replicated_layout: bool = False
    canonical_layout: bool = False
    kv_cache_layout: Optional[str] = None


@dataclasses.dataclass
class Request:
    req_id: str
    kv_transfer_params: Any = None


@dataclasses.dataclass
class TransferJob:
    job_id: int
    keys: Collection[bytes]
    chunk_ids: Any
    is_promotion: bool
    req_context: Any


def install(version="0.32.0"):
    """In the place of modules."""
    base = types.SimpleNamespace(LookupResult=LookupResult, Locality=Locality,
                                 RequestOffloadingContext=RequestOffloadingContext)
    tiering = types.SimpleNamespace(JobResult=JobResult, SecondaryTierManager=SecondaryTierManager)
    sys.modules.update({"vllm": types.SimpleNamespace(__version__=version), "vllm.v1.kv_offload.base": base,
                        "vllm.v1.kv_offload.tiering.base": tiering})
