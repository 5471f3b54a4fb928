"""LMCache's native_plugin over a KV store, without LMCache: the calls that its NativeConnectorL2Adapter (0.5.6) makes, with
keys as it writes them, and a thread that polls and drains as its does."""
import hashlib
import random
import select
import signal
import threading
import unittest

from baton.kv_store.lmcache import BatonStore
from store_process import PATIENCE, WithStore

MODELS = {"org/model": {"weights": "w1", "dtype": "bfloat16", "layout": "256 tokens"},
          "other": {"weights": "w2", "dtype": "bfloat16", "layout": "256 tokens"}}
SIZE = 8192


def key(number, model="org/model", rank=0x01000100, group=0, salt=""):
    hexed = hashlib.sha256(str(number).encode()).hexdigest()
    return f"{model}@{rank:08x}@{group:x}@{hexed}" + (f"@{salt}" if salt else "")


def block(number):
    return random.Random(number).randbytes(SIZE)


class Adapter:
    """What LMCache does with a connector."""

    REQUIRED = ("event_fd", "submit_batch_get", "submit_batch_set", "submit_batch_exists", "drain_completions", "close")

    def __init__(self, client):
        assert all(callable(getattr(client, name, None)) for name in self.REQUIRED)
        self.client, self.lock, self.ended, self.stop = client, threading.Condition(), {}, False
        self.pending = set()
        self.thread = threading.Thread(target=self.demux)
        self.thread.start()

    def demux(self):
        poller = select.poll()
        poller.register(int(self.client.event_fd()), select.POLLIN)
        while not self.stop:
            if not poller.poll(50):
                continue
            for number, ok, error, results in self.client.drain_completions():
                with self.lock:
                    self.pending.remove(int(number))
                    self.ended[int(number)] = (ok, error, results)
                    self.lock.notify_all()

    def submit(self, call, *arguments):
        with self.lock:
            number = call(*arguments)
            self.pending.add(number)
            return number

    def wait(self, number):
        with self.lock:
            assert self.lock.wait_for(lambda: number in self.ended, PATIENCE), "a batch that never ends"
            return self.ended.pop(number)

    def set(self, keys, values):
        return self.wait(self.submit(self.client.submit_batch_set, keys, [memoryview(one) for one in values]))

    def exists(self, keys):
        return self.wait(self.submit(self.client.submit_batch_exists, keys))[2]

    def get(self, keys):
        """The bytes of each, None where it is a miss."""
        memory = [bytearray(SIZE) for _ in keys]
        ok, error, results = self.wait(self.submit(self.client.submit_batch_get, keys,
                                                   [memoryview(one) for one in memory]))
        assert ok and not error
        return [bytes(room) if right else None for room, right in zip(memory, results)]

    def close(self):
        self.stop = True
        self.thread.join()
        self.client.close()


class Plugin(WithStore):
    def adapter(self, address, models=MODELS, silence=PATIENCE / 2, **how):
        client = BatonStore(address, models, silence=silence, timeout=PATIENCE, retry=0.02, **how)
        adapter = Adapter(client)
        self.addCleanup(adapter.close)
        self.assertTrue(client._store.here(PATIENCE))
        return adapter

    def test_what_was_set_is_got_and_the_rest_is_a_miss(self):
        adapter = self.adapter(self.store().address)
        keys = [key(i) for i in range(10)]
        self.assertEqual(adapter.exists(keys), [False] * 10)
        self.assertEqual(adapter.set(keys[:6], [block(i) for i in range(6)]), (True, "", [True] * 6))
        self.assertEqual(adapter.exists(keys), [True] * 6 + [False] * 4)
        self.assertEqual(adapter.get(keys), [block(i) for i in range(6)] + [None] * 4)
        self.assertEqual(adapter.get([]), [])

    # Promise(python): A block of another model, type, layout or tenant is a miss for LMCache | its
    #   name hashes all of them
    def test_a_block_of_another_model_rank_group_or_salt_is_another(self):
        store = self.store()
        adapter = self.adapter(store.address)
        first = key(1)
        strange = [key(2), key(1, "other"), key(1, rank=0x02000200), key(1, rank=0x02010201), key(1, group=1),
                   key(1, salt="a"), key(1, salt="b"), key(1) + "@"]
        adapter.set([first], [block(1)])
        self.assertEqual(adapter.exists([first] + strange), [True] + [False] * len(strange))
        self.assertEqual(adapter.get(strange), [None] * len(strange))
        same = self.adapter(store.address)
        self.assertEqual(same.get([first]), [block(1)])
        for field in ("weights", "tokenizer", "dtype", "layout", "adapter", "salt"):
            said = {"org/model": {**MODELS["org/model"], field: "another"}}
            self.assertEqual(self.adapter(store.address, said).get([first]), [None], field)

    def test_what_cannot_be_named_is_neither_kept_nor_found(self):
        adapter = self.adapter(self.store().address)
        short = "org/model@01000100@0@" + "ab" * 8  # Python's hash()
        strange = [key(1, "unknown"), short, "org/model", "", "@@@", "a@b@c@d@e@f"]
        values = [block(i) for i in range(len(strange))]
        ok, error, results = adapter.set(strange + [key(1)], values + [block(1)])
        self.assertEqual((ok, results), (False, [False] * len(strange) + [True]))
        self.assertIn("6 of 7", error)
        self.assertEqual(adapter.get(strange + [key(1)]), [None] * len(strange) + [block(1)])

    def test_configuration_that_would_mix_models_up_is_refused(self):
        for models in ({}, {"m": {}}, {"m": {"weights": "w"}}, {"m": {"weights": "w", "dtype": "d"}},
                       {"m": {"dtype": "d", "layout": "l"}}, {"m": {"weights": "w", "dtype": "d", "layout": "l", "x": 1}}):
            with self.assertRaises(ValueError):
                BatonStore("127.0.0.1:1", models)
        with self.assertRaises(ValueError):
            BatonStore("nowhere", MODELS)

    def test_many_batches_at_once_and_large_ones(self):
        adapter = self.adapter(self.store(256).address, workers=8)
        numbers = list(range(4000))
        sets = [adapter.submit(adapter.client.submit_batch_set, [key(i) for i in numbers[at:at + 200]],
                               [memoryview(block(i)) for i in numbers[at:at + 200]]) for at in range(0, 4000, 200)]
        self.assertTrue(all(adapter.wait(one)[0] for one in sets))
        self.assertEqual(adapter.get([key(i) for i in numbers]), [block(i) for i in numbers])
        rooms = {i: bytearray(SIZE) for i in range(200)}
        gets = {i: adapter.submit(adapter.client.submit_batch_get, [key(i)], [memoryview(room)])
                for i, room in rooms.items()}
        for i, one in gets.items():
            self.assertEqual(adapter.wait(one), (True, "", [True]))
            self.assertEqual(bytes(rooms[i]), block(i))

    def test_close_ends_what_waits_and_what_runs(self):
        store = self.store()
        adapter = self.adapter(store.address, workers=2)
        adapter.set([key(1)], [block(1)])
        store.stop()
        for _ in range(10):
            adapter.submit(adapter.client.submit_batch_get, [key(1)], [memoryview(bytearray(SIZE))])
        adapter.close()
        ended = adapter.client.drain_completions()
        self.assertEqual([one.results for one in ended], [[False]] * 10)
        with self.assertRaises(ValueError):
            adapter.client.submit_batch_exists([key(1)])


if __name__ == "__main__":
    signal.alarm(500)  # a hang says where
    unittest.main()
