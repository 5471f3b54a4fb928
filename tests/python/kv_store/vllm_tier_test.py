"""vLLM's tier over a KV store, without vLLM: the calls that its TieringOffloadingManager (0.32) makes, step by step."""
import dataclasses
import hashlib
import pathlib
import random
import signal
import tempfile
import types
import unittest

import vllm_fakes as fakes
from helpers import until
from store_process import PATIENCE, Store, WithStore

fakes.install()
from baton.kv_store.vllm_tier import BatonTier  # noqa: E402: where vLLM would be

SIZE, CHUNKS = 4096, 64
MISS, HIT, RETRY = fakes.LookupResult.MISS, fakes.LookupResult.HIT, fakes.LookupResult.RETRY


def key(number, group=0):
    return hashlib.sha256(str(number).encode()).digest() + group.to_bytes(4, "big")


def block(number):
    return random.Random(number).randbytes(SIZE)


class Engine:
    """A first tier of some chunks and what vLLM's scheduler does with a second one."""

    def __init__(self, address, config=fakes.Config(), silence=PATIENCE / 2, names=None, **how):
        self.memory = bytearray(SIZE * CHUNKS)
        self.view = memoryview(self.memory).cast("B", (CHUNKS, SIZE))
        self.tier = BatonTier(types.SimpleNamespace(config=config), self.view, "BatonTier", backpressure_detector=None,
                              store=address, names=names or {"weights": "w"}, silence=silence, timeout=PATIENCE, retry=0.02, **how)
        assert self.tier._store.here(PATIENCE)
        self.jobs = 0

    def job(self, keys, chunks, load):
        self.jobs += 1
        job = fakes.TransferJob(self.jobs, keys, chunks, load, fakes.Request("any"))
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return self.jobs

    def finished(self, number):
        """That job's result, of one that is alone."""
        found = []
        until(lambda: found.extend(self.tier.get_finished_jobs()) or found)
        assert [one.job_id for one in found] == [number]
        return found[0]

    def store(self, numbers, chunks=None):
        chunks = list(range(len(numbers))) if chunks is None else chunks
        for number, chunk in zip(numbers, chunks):
            self.memory[chunk * SIZE:(chunk + 1) * SIZE] = block(number)
        return self.finished(self.job([key(one) for one in numbers], chunks, False))

    def load(self, numbers, chunks=None):
        """(result, the bytes of each that is there)."""
        chunks = list(range(len(numbers))) if chunks is None else chunks
        result = self.finished(self.job([key(one) for one in numbers], chunks, True))
        here = set(key(one) for one in numbers) if result.success else set(result.successful_keys or ())
        return result, [bytes(self.memory[chunk * SIZE:(chunk + 1) * SIZE]) if key(one) in here else None
                        for one, chunk in zip(numbers, chunks)]

    def look(self, numbers, request=None):
        """As vLLM asks: step after step, until all is known."""
        asking = request or fakes.Request("of this call")
        found = []

        def step():
            found[:] = [self.tier.lookup(key(one), asking) for one in numbers]
            self.tier.on_schedule_end(None)
            return RETRY not in found

        until(step)
        if request is None:
            self.tier.on_request_finished(asking)
        return found

    def close(self):
        self.tier.shutdown()
        self.view.release()
        self.memory.clear()  # BufferError if the tier still held some of it


class Tier(WithStore):
    def engine(self, address, **how):
        engine = Engine(address, **how)
        self.addCleanup(engine.close)
        return engine

    def test_chunks_are_found_by_another_engine_and_others_are_not(self):
        store = self.store()
        one, other = self.engine(store.address), self.engine(store.address, locality="REMOTE")
        self.assertEqual(one.look([1, 2, 3]), [MISS] * 3)
        result = one.store([1, 2], [7, 3])
        self.assertEqual((result.success, result.transfer_bytes), (True, 2 * SIZE))
        self.assertEqual(other.look([1, 2, 3]), [HIT, HIT, MISS])
        result, found = other.load([2, 1], [0, 63])
        self.assertEqual((result.success, found), (True, [block(2), block(1)]))
        self.assertEqual(bytes(other.memory[SIZE:63 * SIZE]), bytes(62 * SIZE))
        self.assertEqual((one.tier.locality, other.tier.locality), (None, fakes.Locality.REMOTE))

    def test_a_lookup_never_waits(self):
        store = self.store()
        engine = self.engine(store.address)
        engine.store([1])
        store.stop()
        request = fakes.Request("a")
        for _ in range(100):
            self.assertEqual(engine.tier.lookup(key(1), request), RETRY)
            engine.tier.on_schedule_end(None)
        store.go_on()
        self.assertEqual(engine.look([1], request), [HIT])

    def test_what_a_request_has_asked_is_known_while_it_lives_and_forgotten_after(self):
        store = self.store()
        one, other = self.engine(store.address), self.engine(store.address)
        first, second = fakes.Request("first"), fakes.Request("second")
        self.assertEqual(one.look([1], first), [MISS])
        other.store([1])
        self.assertEqual(one.look([1], second), [MISS])  # shared
        one.tier.on_request_finished(first)
        self.assertEqual(one.look([1], second), [MISS])
        one.tier.on_request_finished(second)
        one.tier.on_request_finished(fakes.Request("never seen"))
        self.assertEqual((one.tier._lookups, one.tier._asked_by), ({}, {}))
        self.assertEqual(one.look([1]), [HIT])
        asked = fakes.Request("gone before the answer")
        self.assertEqual(one.tier.lookup(key(2), asked), RETRY)
        one.tier.on_request_finished(asked)
        one.tier.on_schedule_end(None)
        self.assertEqual(one.look([2]), [MISS])

    def test_a_load_that_fails_in_part_keeps_the_rest_and_is_a_miss_from_then_on(self):
        engine = self.engine(self.store().address)
        engine.store([1, 2])
        request = fakes.Request("a")
        self.assertEqual(engine.look([1, 2], request), [HIT, HIT])
        engine.tier._lookups[key(3)] = types.SimpleNamespace(verdict=True, requests={"a"})  # found, and forgotten since
        engine.tier._asked_by["a"].add(key(3))
        result, found = engine.load([1, 3, 2])
        self.assertEqual((result.success, set(result.successful_keys), found),
                         (False, {key(1), key(2)}, [block(1), None, block(2)]))
        self.assertEqual(engine.look([1, 3, 2], request), [HIT, MISS, HIT])  # vLLM would load for ever otherwise
        result, found = engine.load([3])
        self.assertEqual((result.success, result.successful_keys), (False, None))

    def test_a_chunk_of_another_model_layout_shard_or_tenant_is_another(self):
        store, base = self.store(), fakes.Config()
        self.engine(store.address).store([1])
        self.assertEqual(self.engine(store.address, config=dataclasses.replace(base, engine_id="x")).look([1]), [HIT])
        changed = [{"groups": (fakes.Group(32),)}, {"groups": (fakes.Group(16, ("a", "c")),)},
                   {"groups": (fakes.Group(), fakes.Group(group_id=1))}, {"worker_kv_bytes_per_block": 2048},
                   {"model": fakes.Model("org/model", "fp8")}, {"cache": fakes.Cache(32)}, {"cache": fakes.Cache(16, 2)},
                   {"parallel": fakes.Parallel(world_size=2, tp_size=2)}, {"parallel": fakes.Parallel(pp_size=2)},
                   {"parallel": fakes.Parallel(pcp_size=2)}, {"parallel": fakes.Parallel(dcp_size=2)},
                   {"replicated_layout": True}, {"canonical_layout": True}, {"kv_cache_layout": "HND"}]
        for change in changed:
            self.assertEqual(self.engine(store.address, config=dataclasses.replace(base, **change)).look([1]), [MISS],
                             change)
        for field in ("weights", "tokenizer", "dtype", "layout", "shard", "adapter", "salt"):
            self.assertEqual(self.engine(store.address, names={"weights": "w", field: "x"}).look([1]), [MISS], field)
        engine = self.engine(store.address)
        self.assertEqual(engine.tier.lookup(key(1, group=1), fakes.Request("a")), RETRY)
        result = engine.finished(engine.job([key(1, group=1)], [0], True))
        self.assertFalse(result.success)

    def test_the_weights_are_those_of_vllms_model(self):
        store = self.store()
        with tempfile.TemporaryDirectory() as folder:
            said = {"tokenizer": "t"}
            for number, weights in ((1, b"weights"), (2, b"other")):
                pathlib.Path(folder, "model.safetensors").write_bytes(weights)
                engine = self.engine(store.address, config=fakes.Config(model=fakes.Model(folder)), names=said)
                self.assertEqual(engine.look([1]), [MISS])
                engine.store([1])
        with self.assertRaisesRegex(ValueError, '"names"'):
            Engine(store.address, config=fakes.Config(model=fakes.Model("/nowhere")), names=said)

    def test_many_jobs_at_once_and_large_ones(self):
        engine = self.engine(self.store().address, threads=4)
        for chunk in range(CHUNKS):
            engine.memory[chunk * SIZE:(chunk + 1) * SIZE] = block(chunk)
        numbers = {engine.job([key(i) for i in range(at, at + 4)], list(range(at, at + 4)), False)
                   for at in range(0, CHUNKS, 4)}
        engine.tier.drain_jobs()
        ended = list(engine.tier.get_finished_jobs())
        self.assertEqual(({one.job_id for one in ended}, {one.success for one in ended}), (numbers, {True}))
        engine.memory[:] = bytes(len(engine.memory))
        result, found = engine.load(list(range(CHUNKS)))
        self.assertEqual((result.success, found), (True, [block(i) for i in range(CHUNKS)]))
        self.assertEqual(engine.look(list(range(2000))), [HIT] * CHUNKS + [MISS] * (2000 - CHUNKS))

    def test_drain_and_shutdown_end_although_the_store_stands_still(self):
        store = self.store()
        engine = self.engine(store.address, silence=0.3)
        until(lambda: engine.store([1]).success)
        store.stop()
        for _ in range(20):
            engine.job([key(1)], [0], True)
        engine.tier.drain_jobs()
        self.assertEqual([one.success for one in engine.tier.get_finished_jobs()], [False] * 20)
        self.assertEqual(engine.tier.lookup(key(1), fakes.Request("a")), MISS)  # at once: the store is away
        other = Store(16)
        self.addCleanup(other.close)
        patient = Engine(other.address)
        patient.store([1])
        other.stop()
        for _ in range(20):
            patient.job([key(1)], [0], True)
        patient.close()


if __name__ == "__main__":
    signal.alarm(500)  # a hang says where
    unittest.main()
