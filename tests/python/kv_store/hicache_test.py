"""SGLang's HiCache over a KV store, without SGLang: the calls that its cache controllers (0.5.23) make of a `dynamic`
backend, with and without "interface_v1"."""
import dataclasses
import hashlib
import pathlib
import random
import signal
import tempfile
import unittest

import sglang_fakes as fakes
from store_process import PATIENCE, WithStore

fakes.install()
from baton.kv_store.hicache import BatonHiCache  # noqa: E402: where SGLang would be

SIZE, STEP = 4096, 4
KV, MAMBA, INDEXER = fakes.PoolName.KV, fakes.PoolName.MAMBA, fakes.PoolName.INDEXER


def key(number):
    return hashlib.sha256(str(number).encode()).hexdigest()


def keys(*numbers):
    return [key(one) for one in numbers]


def block(number, size=SIZE):
    return random.Random(number).randbytes(size)


def places(*pages):
    return [page * STEP + token for page in pages for token in range(STEP)]


class HiCache(WithStore):
    def backend(self, address, pool=None, names=None, silence=PATIENCE / 2, **config):
        extra = {"backend_name": "baton", "module_path": "baton.kv_store.hicache", "class_name": "BatonHiCache",
                 "interface_v1": 1, "store": address, "names": names or {"weights": "w"}, "silence": silence,
                 "timeout": PATIENCE, "retry": 0.02}
        backend = BatonHiCache(fakes.HiCacheStorageConfig(extra_config=extra, **config), {})
        self.addCleanup(backend.close)
        backend.register_mem_pool_host(pool or fakes.Pool())
        self.assertTrue(backend._store.here(PATIENCE))
        return backend

    def put(self, backend, *numbers):
        """Pages of those numbers, from the first places of the pool."""
        for place, number in enumerate(numbers):
            backend.mem_pool_host.pages[place] = block(number, backend.mem_pool_host.size)
        return backend.batch_set_v1(keys(*numbers), places(*range(len(numbers))))

    def test_pages_are_found_by_another_engine_and_others_are_not(self):
        store = self.store()
        one, other = self.backend(store.address), self.backend(store.address)
        self.assertEqual(one.batch_exists(keys(1, 2, 3)), 0)
        self.assertEqual(self.put(one, 1, 2, 4), [True] * 3)
        self.assertEqual((other.batch_exists(keys(1, 2, 3, 4)), other.batch_exists(keys(3, 4)), other.exists(key(4)),
                          other.exists(key(3)), other.batch_exists([])), (2, 0, True, False, 0))
        other.mem_pool_host.pages[20] = b"as it was" * 2
        self.assertEqual(other.batch_get_v1(keys(1, 3, 4), places(10, 20, 30)), [True, False, True])
        self.assertEqual(other.mem_pool_host.pages[10], block(1))
        self.assertEqual(other.mem_pool_host.pages[20], b"as it was" * 2)  # a miss touches nothing
        self.assertEqual(other.mem_pool_host.pages[30], block(4))
        self.assertEqual((other.batch_get_v1([], None), other.batch_set_v1([], [])), ([], []))
        with self.assertRaises(ValueError):
            other.batch_get_v1(keys(1, 2, 3), places(1, 2)[:-1])

    def test_without_interface_v1(self):
        store = self.store()
        one, other = self.backend(store.address), self.backend(store.address)
        self.assertTrue(one.batch_set(keys(1, 2), [fakes.Page(block(1)), fakes.Page(block(2))]))
        self.assertTrue(one.set(key(3), fakes.Page(block(3))))
        pages = [fakes.Page(bytes(SIZE)) for _ in range(4)]
        found = other.batch_get(keys(1, 9, 2, 3), pages)
        self.assertEqual([one and bytes(one.data) for one in found], [block(1), None, block(2), block(3)])
        self.assertIsNone(other.get(key(9), pages[0]))
        self.assertIs(other.get(key(1), pages[0]), pages[0])
        self.assertEqual(self.backend(store.address).batch_get_v1(keys(1), places(0)), [True])  # one name by either way

    # Promise(python): A block of another model, type, layout or tenant is a miss for SGLang | its
    #   name hashes all of them
    def test_a_page_of_another_model_layout_shard_or_tenant_is_another(self):
        store, pool = self.store(), fakes.Pool
        self.put(self.backend(store.address, tp_size=2), 1)

        def found(**how):
            return self.backend(store.address, **{"tp_size": 2, **how}).exists(key(1))

        self.assertTrue(found())
        self.assertTrue(found(dp_rank=1, model_name="another name of it"))
        for change in ({"tp_size": 4}, {"tp_rank": 1}, {"pp_size": 2}, {"pp_rank": 1}, {"attn_cp_size": 2},
                       {"attn_cp_rank": 1}, {"dcp_size": 2}, {"dcp_rank": 1}, {"logical_page_size": 8}, {"is_mla_model": True},
                       {"pool": pool(page_size=8)}, {"pool": pool(dtype="torch.float16")}, {"pool": pool(layout="page_first")},
                       {"pool": pool(page_bytes=8192)}, {"pool": pool(head_num=2)}, {"pool": pool(start_layer=4)},
                       {"pool": pool(storage_format_tag="x")}):
            self.assertFalse(found(**change), change)
        for field in ("weights", "tokenizer", "dtype", "layout", "shard", "adapter", "salt"):
            self.assertFalse(found(names={"weights": "w", field: "x"}), field)

    def test_pages_of_mla_are_one_at_all_ranks_and_states_are_not(self):
        store = self.store()
        first = self.backend(store.address, is_mla_model=True, tp_size=4, tp_rank=0)
        other = self.backend(store.address, is_mla_model=True, tp_size=4, tp_rank=3)
        for backend in (first, other):
            backend.register_mem_host_pool_v2(fakes.Pool(), MAMBA)
        self.put(first, 1)
        state = fakes.PoolTransfer(MAMBA, places(0), keys=keys(1))
        self.assertEqual(first.batch_set_v2([state]), {MAMBA: [True]})
        self.assertEqual(other.batch_get_v1(keys(1), places(7)), [True])
        self.assertEqual(other.batch_get_v2([state]), {MAMBA: [False]})
        self.assertEqual(first.batch_get_v2([state]), {MAMBA: [True]})

    def test_configuration_that_would_mix_models_up_is_refused(self):
        config = fakes.HiCacheStorageConfig
        for extra in (None, {}, {"store": "127.0.0.1:1"}, {"store": "127.0.0.1:1", "names": {"model": "/nowhere"}},
                      {"store": "nowhere", "names": {"weights": "w"}}, {"names": {"weights": "w"}},
                      {"store": "127.0.0.1:1", "names": {"weights": "w", "weight": "x"}}):
            with self.assertRaises(ValueError):
                BatonHiCache(config(extra_config=extra), {})
        store = self.store()
        for dtype in ("torch.uint8", "torch.int8"):  # fp8 of two kinds, as the pool has them
            with self.assertRaisesRegex(ValueError, "fp8"):
                self.backend(store.address, pool=fakes.Pool(dtype=dtype))
            said = {"weights": "w", "dtype": "fp8_e5m2"}
            self.assertFalse(self.backend(store.address, pool=fakes.Pool(dtype=dtype), names=said).exists(key(1)))
        with self.assertRaises(ValueError):
            self.backend(store.address).batch_get_v2([fakes.PoolTransfer(INDEXER, places(0), keys=keys(1))])

    def test_weights_are_told_by_their_bytes(self):
        store = self.store()
        with tempfile.TemporaryDirectory() as folder:
            for weights in (b"weights", b"other"):
                pathlib.Path(folder, "model.safetensors").write_bytes(weights)
                backend = self.backend(store.address, names={"model": folder})
                self.assertFalse(backend.exists(key(1)))
                self.put(backend, 1)
                self.assertTrue(backend.exists(key(1)))

    def test_prefixes_that_several_pools_must_have(self):
        backend = self.backend(self.store().address)
        for name in (MAMBA, INDEXER):
            backend.register_mem_host_pool_v2(fakes.Pool(page_bytes=512), name)
        self.put(backend, *range(8))

        def have(name, *numbers):
            for number in numbers:
                backend.registered_pools[name].pages[number] = block(number, 512)
            done = backend.batch_set_v2([fakes.PoolTransfer(name, places(*numbers), keys=keys(*numbers))])
            self.assertEqual(done, {name: [True] * len(numbers)})

        def ask(*transfers):
            result = backend.batch_exists_v2(keys(*range(10)), list(transfers))
            return result.kv_hit_pages, result.extra_pool_hit_pages, result.restorable_prefix_pages

        every = fakes.PoolTransfer(INDEXER, hit_policy=fakes.PoolHitPolicy.ALL_PAGES)
        last = fakes.PoolTransfer(MAMBA, keys=["one"], hit_policy=fakes.PoolHitPolicy.TRAILING_PAGES)
        two = dataclasses.replace(last, keys=["one", "two"])
        self.assertEqual(ask(), (8, {KV: 8}, list(range(1, 9))))
        self.assertEqual(ask(every), (0, {KV: 8}, []))
        have(INDEXER, 0, 1, 2, 3, 4, 5, 7)
        self.assertEqual(ask(every), (6, {KV: 8, INDEXER: 6}, list(range(1, 7))))
        self.assertEqual(ask(every, last), (0, {KV: 8, INDEXER: 6}, []))
        have(MAMBA, 1, 4, 5, 7)
        self.assertEqual(ask(last), (8, {KV: 8, MAMBA: 8}, [2, 5, 6, 8]))
        self.assertEqual(ask(every, last), (6, {KV: 8, INDEXER: 6, MAMBA: 8}, [2, 5, 6]))
        self.assertEqual(ask(two), (6, {KV: 8, MAMBA: 6}, [6]))
        with self.assertRaises(ValueError):
            ask(dataclasses.replace(every, hit_policy=fakes.PoolHitPolicy.BLOCK_GROUPS))
        got = backend.batch_get_v2([fakes.PoolTransfer(MAMBA, places(20, 21), keys=keys(4, 6)),
                                    fakes.PoolTransfer(INDEXER, places(22), keys=keys(4))])
        self.assertEqual(got, {MAMBA: [True, False], INDEXER: [True]})
        self.assertEqual(backend.registered_pools[MAMBA].pages[20], block(4, 512))

    def test_clear_takes_no_page_of_others(self):
        backend = self.backend(self.store().address)
        self.put(backend, 1)
        self.assertFalse(backend.clear())
        self.assertTrue(backend.exists(key(1)))
        backend.close()
        self.assertEqual((backend.exists(key(1)), backend.counts()["kept"]), (False, 1))


if __name__ == "__main__":
    signal.alarm(500)  # a hang says where
    unittest.main()
