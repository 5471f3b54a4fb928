"""vLLM's tier over a KV store, with vLLM's own TieringOffloadingSpec, factory, managers and shared memory in place of fakes:
two engines, one after the other, and the second finds what the first has kept; byte for byte, or not at all.

usage: with_vllm_test.py BATON"""
import dataclasses
import hashlib
import inspect
import random
import signal
import unittest

import vllm_fakes as fakes
from helpers import until
from store_process import PATIENCE, Store
from vllm.v1.kv_offload import base, config
from vllm.v1.kv_offload.tiering import base as tiering
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

SIZE = 4096


def key(number):
    return base.make_offload_key(hashlib.sha256(str(number).encode()).digest(), 0)


def block(number):
    return random.Random(number).randbytes(SIZE)


class Engine:
    """What vLLM's scheduler does, with its own managers."""

    def __init__(self, name, store, names, silence, chunks=32):
        tier = {"type": "BatonTier", "module_path": "baton.kv_store.vllm_tier", "store": store.address, "names": names,
                "locality": "REMOTE", "silence": silence, "timeout": PATIENCE, "retry": 0.02}
        parallel = dict.fromkeys((one.name for one in dataclasses.fields(config.OffloadingParallelConfig)), 1)
        parallel.update(rank=0, data_parallel_index=0, data_parallel_rank_local=None, is_parallelism_agnostic=False)
        self.spec = TieringOffloadingSpec(config.OffloadingConfig(
            groups=(config.OffloadingGroupConfig(16, ("a",), 0),), worker_kv_bytes_per_block=SIZE,
            enable_kv_cache_events=False, extra_config={"cpu_bytes_to_use": chunks * SIZE, "secondary_tiers": [tier]},
            engine_id=name, model=config.OffloadingModelConfig("org/model", "bfloat16"),
            cache=config.OffloadingCacheConfig(16, 1), parallel=config.OffloadingParallelConfig(**parallel)))
        self.manager = self.spec.get_manager()
        self.tier = self.manager.secondary_tiers[0]
        assert self.tier._store.here(PATIENCE)
        self.requests = 0

    def request(self):
        self.requests += 1
        one = base.ReqContext(f"request {self.requests}")
        self.manager.on_new_request(one)
        return one

    def step(self):
        self.manager.on_schedule_end(base.ScheduleEndContext((), ()))

    def keep(self, numbers):
        request = self.request()
        keys = [key(one) for one in numbers]
        kept = self.manager.prepare_store(keys, request)
        view = self.manager.primary_tier.get_kv_memoryview().cast("B")
        for one, chunk in zip(kept.keys_to_store, kept.store_spec.chunk_ids):
            view[chunk * SIZE:(chunk + 1) * SIZE] = block(numbers[keys.index(one)])
        view.release()
        self.manager.complete_store(kept.keys_to_store, request)
        self.manager.on_request_finished(request)
        until(lambda: self.step() or not self.manager.has_pending_work())

    def find(self, numbers):
        """The bytes of each, as a worker would copy them; None where it must be computed."""
        request, keys, found = self.request(), [key(one) for one in numbers], []

        def step():
            found[:] = [self.manager.lookup(one, request) for one in keys]
            self.step()
            return all(one in (base.LookupResult.HIT, base.LookupResult.MISS) for one in found)

        until(step)
        here = [one for one, result in zip(keys, found) if result is base.LookupResult.HIT]
        values = {}
        if here:
            spec = self.manager.prepare_load(here, request)
            view = self.manager.primary_tier.get_kv_memoryview().cast("B")
            for one, chunk in zip(here, spec.chunk_ids):
                values[one] = bytes(view[chunk * SIZE:(chunk + 1) * SIZE])
            view.release()
            self.manager.complete_load(here, request)
        self.manager.on_request_finished(request)
        return [values.get(one) for one in keys]

    def close(self):
        self.manager.shutdown()


class WithVllm(unittest.TestCase):
    def setUp(self):
        self.store = Store(64)
        self.addCleanup(self.store.close)

    def engine(self, name, names=None, silence=PATIENCE / 2):
        engine = Engine(name, self.store, names or {"weights": "w"}, silence)
        self.addCleanup(engine.close)
        return engine

    def test_a_second_engine_finds_what_the_first_has_kept(self):
        first = self.engine("baton-test-1")
        first.keep(list(range(10)))
        second = self.engine("baton-test-2")
        self.assertEqual(second.find([3, 4, 100, 9]), [block(3), block(4), None, block(9)])
        self.assertEqual(second.find([3, 4, 100, 9]), [block(3), block(4), None, block(9)])
        self.assertEqual(second.tier._store.counts()["hits"], 3)  # the second time from its own memory
        self.assertEqual(self.engine("baton-test-3", {"weights": "other"}).find([3]), [None])

    def test_a_store_that_stands_still_or_is_killed_is_a_miss(self):
        first = self.engine("baton-test-1")
        first.keep([1, 2, 3])
        second = self.engine("baton-test-2", silence=0.5)
        until(lambda: second.find([1]) == [block(1)])
        for end, begin in ((self.store.stop, self.store.go_on), (self.store.kill, self.store.start)):
            end()
            self.assertEqual(second.find([2, 3]), [None, None])
            begin()
            self.assertTrue(second.tier._store.here(PATIENCE))
        first.keep([4])
        until(lambda: second.find([4]) == [block(4)] or first.keep([4]))

    def test_the_fakes_are_as_the_real_ones(self):
        for fake, real in ((fakes.JobResult, tiering.JobResult), (fakes.Parallel, config.OffloadingParallelConfig),
                           (fakes.Group, config.OffloadingGroupConfig), (fakes.Model, config.OffloadingModelConfig),
                           (fakes.Cache, config.OffloadingCacheConfig), (fakes.Config, config.OffloadingConfig),
                           (fakes.TransferJob, tiering.TransferJob), (fakes.Request, base.ReqContext)):
            names = [one.name for one in dataclasses.fields(fake)]
            self.assertEqual(names, [one.name for one in dataclasses.fields(real) if one.name in names])
        self.assertEqual(list(inspect.signature(fakes.SecondaryTierManager).parameters),
                         list(inspect.signature(tiering.SecondaryTierManager.__init__).parameters)[1:])
        self.assertEqual(set(fakes.LookupResult.__members__), set(base.LookupResult.__members__))
        self.assertEqual(set(fakes.Locality.__members__), set(base.Locality.__members__))
        tier = self.engine("baton-test-1").tier
        self.assertIsInstance(tier, tiering.SecondaryTierManager)
        for name, call in vars(tiering.SecondaryTierManager).items():
            if callable(call) and name in vars(type(tier)) and not name.startswith("_"):
                self.assertEqual(inspect.signature(getattr(type(tier), name)).parameters.keys(),
                                 inspect.signature(call).parameters.keys(), name)


if __name__ == "__main__":
    signal.alarm(900)  # a hang says where
    unittest.main()
