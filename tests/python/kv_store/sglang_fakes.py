"""What a backend of SGLang's HiCache derives from and is handed, in SGLang's place (0.5.23:
sglang/srt/mem_cache/hicache_storage.py and pool_host/)."""
import dataclasses
import enum
import sys
import types
from typing import Any, List, Optional

import baton


class PoolName(str, enum.Enum):
    KV = "kv"
    MAMBA = "mamba"
    INDEXER = "indexer"

    def __str__(self):
        return self.value


class PoolHitPolicy(str, enum.Enum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclasses.dataclass
class PoolTransfer:
    name: PoolName
    host_indices: Any = None
    device_indices: Any = None
    keys: Optional[List[str]] = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclasses.dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict
    restorable_prefix_pages: Optional[List[int]] = None


@dataclasses.dataclass
class HiCacheStorageConfig:
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = False
    model_name: Optional[str] = "served"
    dp_rank: int = 0
    extra_config: Optional[dict] = None
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: Optional[int] = None


class HiCacheStorage:
    def register_mem_pool_host(self, mem_pool_host):
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool, host_pool_name):
        if not hasattr(self, "registered_pools"):
            self.registered_pools = {}
        self.registered_pools[host_pool_name] = host_pool


class Page:
    """As much of a flat torch tensor as a backend looks at."""

    device = types.SimpleNamespace(type="cpu")

    def __init__(self, data):
        self.data = bytearray(data)

    def numel(self):
        return len(self.data)

    def element_size(self):
        return 1

    def data_ptr(self):
        return baton.memory_of(self.data).address

    def is_contiguous(self):
        return True

    def contiguous(self):
        return self


class Pool:
    """Host memory of pages of `page_size` tokens."""

    def __init__(self, pages=64, page_bytes=4096, page_size=4, dtype="torch.bfloat16", layout="layer_first", **more):
        self.page_size, self.dtype, self.layout, self.size = page_size, dtype, layout, page_bytes
        self.pages = [bytes(page_bytes) for _ in range(pages)]
        self.__dict__.update(more)

    def get_data_page(self, index, flat=True):
        return Page(self.pages[index // self.page_size])

    def get_dummy_flat_data_page(self):
        return Page(bytes(self.size))

    def set_from_flat_data_page(self, index, data_page):
        self.pages[index // self.page_size] = bytes(data_page.data)


def install(version="0.5.23"):
    """In the place of modules."""
    storage = types.SimpleNamespace(HiCacheStorage=HiCacheStorage, PoolHitPolicy=PoolHitPolicy, PoolName=PoolName,
                                    PoolTransferResult=PoolTransferResult)
    sys.modules.update({"sglang": types.SimpleNamespace(__version__=version),
                        "sglang.srt.mem_cache.hicache_storage": storage})
