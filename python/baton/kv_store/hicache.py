"""SGLang's third level in a store: a `dynamic` backend of HiCache, chosen by configuration (seen with SGLang 0.5.23).

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
      "backend_name": "baton", "module_path": "baton.kv_store.hicache", "class_name": "BatonHiCache", "interface_v1": 1,
      "store": "10.0.0.7:65432", "names": {"model": "/models/llama-3.1-8b"}}'

SGLang keeps pages in host memory, puts them here from a thread of its own, and asks here for the pages of a prompt from
another; its calls wait until they are done, at most as long as KvStore does. A page is checked in memory of this
plug-in's, and only then copied to where SGLang's pages lie.
"""
from __future__ import annotations

import ctypes
import functools
import json
import logging
import threading
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import sglang
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from ..buffers import host_memory_of
from .client import KvStore
from .names import Names, names_of, settled

log = logging.getLogger("baton.kv_store")
_AT_ONCE = 32 << 20  # bytes of pages on their way, of one call
_LIMITS = ("silence", "timeout", "retry")


class BatonHiCache(HiCacheStorage):
    """Pages in `baton kv_store --lm-port`. In the extra configuration:

    store    HOST:PORT of that
    names    "model", where the weights lie, or "weights", what names them: SGLang tells a backend only what the model is
             called. "tokenizer", "adapter", "salt", "dtype", "layout" are added to what counts
    silence, timeout, retry   as of KvStore
    """

    def __init__(self, storage_config: Any, kwargs: Optional[Dict[str, Any]] = None) -> None:
        extra = storage_config.extra_config or {}
        if not extra.get("store"):
            raise ValueError('no "store" in --hicache-storage-backend-extra-config: HOST:PORT of `baton kv_store --lm-port`')
        self._config, self._said = storage_config, settled(extra.get("names") or {})
        self._names: Dict[str, Names] = {}
        self._pools: Dict[str, Any] = {}
        self._sizes: Dict[str, int] = {}        # of a page
        self._spare: Dict[str, List[Any]] = {}  # pages to read into
        self._lock = threading.Lock()
        self._store = KvStore(extra["store"], **{name: float(extra[name]) for name in _LIMITS if name in extra})

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool whose pages are read and written where a call names none."""
        super().register_mem_pool_host(mem_pool_host)
        self._know(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Another pool, of models that have several."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._know(host_pool_name, host_pool)

    # --- pages of the first pool

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Reads into a flat page. None: it is not here, and the page may hold anything."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: List[str], target_locations: Any = None, target_sizes: Any = None) -> List[Any]:
        """As get(), of many."""
        right = self._store.get(self._keys(PoolName.KV, keys), [_bytes_of(page) for page in target_locations])
        return [page if here else None for page, here in zip(target_locations, right)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Stores the page; returns True if the store kept it."""
        return self.batch_set([key], [value])

    def batch_set(self, keys: List[str], values: Any = None, target_locations: Any = None,
                  target_sizes: Any = None) -> bool:
        """Stores the pages; True if the store kept all of them."""
        pages = [value.contiguous() for value in values]
        return all(self._store.put(self._keys(PoolName.KV, keys), [_bytes_of(page) for page in pages]))

    def exists(self, key: str) -> bool:
        """True if the store has the page. It may evict the page before a read."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: List[str], extra_info: Any = None) -> int:
        """How many are here, up to the first that is not."""
        return _leading(self._store.exists(self._keys(PoolName.KV, keys)))

    def batch_get_v1(self, keys: List[str], host_indices: Any, extra_info: Any = None) -> List[bool]:
        """Reads pages into the pool: of each, whether it is there now. One that is not has not been touched."""
        return self._read(PoolName.KV, keys, host_indices)

    def batch_set_v1(self, keys: List[str], host_indices: Any, extra_info: Any = None) -> List[bool]:
        """Of each page of the pool, whether it is kept."""
        return self._write(PoolName.KV, keys, host_indices)

    # --- pages of several pools

    def batch_exists_v2(self, keys: List[str], pool_transfers: Any = None, extra_info: Any = None) -> PoolTransferResult:
        """How long a prefix can be had from all pools: ALL_PAGES wants every page of it, TRAILING_PAGES the last ones."""
        pages = _leading(self._store.exists(self._keys(PoolName.KV, keys)))
        hits = {PoolName.KV: pages} if pages else {}
        restorable = list(range(1, pages + 1))
        for transfer in pool_transfers or ():
            if not restorable:
                break
            if transfer.hit_policy not in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
                raise ValueError(f"pages of {transfer.name} are wanted by {transfer.hit_policy}, which is not known here")
            here = self._store.exists(self._keys(transfer.name, keys[:pages]))
            trailing = max(1, len(transfer.keys or ()))
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                possible = set(range(1, _leading(here) + 1))
            else:
                possible = {end for end in range(1, pages + 1) if all(here[max(0, end - trailing):end])}
            if possible:
                hits[transfer.name] = max(possible)
            restorable = [end for end in restorable if end in possible]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> Dict[str, List[bool]]:
        """As batch_get_v1(), for each pool."""
        return {one.name: self._read(one.name, one.keys or [], one.host_indices) for one in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> Dict[str, List[bool]]:
        """As batch_set_v1(), for each pool."""
        return {one.name: self._write(one.name, one.keys or [], one.host_indices) for one in transfers}

    def clear(self) -> bool:
        """False: other engines have their pages there. The store forgets what was used longest ago by itself."""
        log.warning("the store at %s is shared, so one engine cannot clear it; restart the store to empty it", self._store.store)
        return False

    def close(self) -> None:
        """Ends what runs."""
        self._store.close()
        counts = self._store.counts()
        log.info("HiCache in %s: %s", self._store.store, ", ".join(f"{n} {name}" for name, n in counts.items()))

    def counts(self) -> Dict[str, int]:
        """As of KvStore."""
        return self._store.counts()

    # --- inside

    def _know(self, name: Any, pool: Any) -> None:
        page = pool.get_dummy_flat_data_page()
        self._names[str(name)] = names_of_pool(self._config, str(name), pool, page, self._said)
        self._sizes[str(name)] = page.numel() * page.element_size()
        self._spare[str(name)], self._pools[str(name)] = [page], pool

    def _keys(self, name: Any, keys: Sequence[str]) -> List[bytes]:
        if str(name) not in self._names:
            raise ValueError(f"no pool {name} was registered: its pages have no names")
        names = self._names[str(name)]
        return [names.key(key.encode()) for key in keys]

    def _read(self, name: Any, keys: Sequence[str], indices: Any) -> List[bool]:
        results: List[bool] = []
        for some, where in self._parts(name, keys, indices):
            pool, pages = self._pools[str(name)], self._take(str(name), len(some))
            right = self._store.get(some, [_bytes_of(page) for page in pages])
            for at, page, here in zip(where, pages, right):
                if here:
                    pool.set_from_flat_data_page(at, page)
            with self._lock:
                self._spare[str(name)] += pages
            results += right
        return results

    def _write(self, name: Any, keys: Sequence[str], indices: Any) -> List[bool]:
        results: List[bool] = []
        for some, where in self._parts(name, keys, indices):
            pages = [self._pools[str(name)].get_data_page(at, flat=True).contiguous() for at in where]
            results += self._store.put(some, [_bytes_of(page) for page in pages])
        return results

    def _parts(self, name: Any, keys: Sequence[str], indices: Any) -> Iterator[Tuple[List[bytes], List[int]]]:
        """Names of pages and their places in the pool, some at a time."""
        names = self._keys(name, keys)
        count, places = len(keys), 0 if indices is None else len(indices)
        if count and (places == 0 or places % count):
            raise ValueError(f"{count} pages of {name}, and places for {places} tokens")
        most = max(1, _AT_ONCE // self._sizes[str(name)])
        for begin in range(0, count, most):
            some = names[begin:begin + most]
            yield some, [int(indices[i * (places // count)]) for i in range(begin, begin + len(some))]

    def _take(self, name: str, count: int) -> List[Any]:
        with self._lock:
            spare = self._spare[name]
            pages = [spare.pop() for _ in range(min(count, len(spare)))]
        return pages + [self._pools[name].get_dummy_flat_data_page() for _ in range(count - len(pages))]


def names_of_pool(config: Any, name: str, pool: Any, page: Any, said: Dict[str, Any]) -> Names:
    """Names for the pages of a pool of SGLang's host memory. `page`: a flat one of it."""
    device = getattr(pool, "device_pool", None)
    if str(pool.dtype).endswith("int8") and not said.get("dtype"):
        raise ValueError(f"pages of {name} are stored as {pool.dtype}, which several dtypes of 8 bits are: say in \"names\" "
                         'which, as {"dtype": "fp8_e4m3"}')
    dtype = json.dumps([str(pool.dtype), str(getattr(device, "dtype", "")), str(getattr(device, "store_dtype", ""))])
    layout = json.dumps([getattr(sglang, "__version__", ""), name, type(pool).__name__, str(pool.layout), pool.page_size,
                         page.numel(), page.element_size(), getattr(pool, "storage_format_tag", None)]
                        + [str(getattr(pool, field, "")) for field in ("layer_num", "start_layer", "end_layer", "head_num",
                                                                       "head_dim", "v_head_dim", "temporal_dtype")])
    # Pages of MLA are the same at all tensor-parallel ranks; a state of Mamba's never is.
    replicated = config.is_mla_model and name != PoolName.MAMBA.value
    tensor = None if replicated and config.dcp_size == 1 else [None if replicated else config.tp_rank, config.tp_size]
    shard = json.dumps([tensor, config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size, config.dcp_rank,
                        config.dcp_size, config.logical_page_size])
    return names_of(said, dtype=dtype, layout=layout, shard=shard)


def _leading(here: Sequence[bool]) -> int:
    return here.index(False) if False in here else len(here)


@functools.lru_cache(maxsize=64)
def _array(count: int) -> Any:
    return ctypes.c_ubyte * count


def _bytes_of(tensor: Any) -> memoryview:
    memory = host_memory_of(tensor)
    return memoryview(_array(memory.bytes).from_address(memory.address)).cast("B")
