"""The way to a KV store: right bytes or a miss, whatever the store, the wire, or the one between them does."""
import array
import hashlib
import random
import signal
import socket
import threading
import time
import unittest

from baton.kv_store import KvStore, Names, names_of
from helpers import until
from store_process import PATIENCE, Between, WithStore


def key(number):
    return hashlib.sha256(str(number).encode()).digest()


def block(number, size=4096):
    return random.Random(number).randbytes(size)


class Flip:
    """Makes one bit another that goes by: the one after so many others."""

    def __init__(self):
        self.disarm()

    def arm(self, to_store, bits):
        self.to_store, self.left = to_store, bits

    def disarm(self):
        self.to_store = None

    def __call__(self, data, to_store):
        if to_store is not self.to_store:
            return data
        if self.left >= 8 * len(data):
            self.left -= 8 * len(data)
            return data
        hurt = bytearray(data)
        hurt[self.left // 8] ^= 1 << self.left % 8
        self.disarm()
        return bytes(hurt)


class Client(WithStore):
    """Each test with a store of its own."""

    def between(self, store, **how):
        between = Between(store.port, **how)
        self.addCleanup(between.close)
        return between

    def client(self, address, silence=PATIENCE / 2, timeout=PATIENCE, here=True, **how):
        client = KvStore(address, silence=silence, timeout=timeout, retry=0.02, **how)
        self.addCleanup(client.close)
        if here:
            self.assertTrue(client.here(PATIENCE))
        return client

    def read(self, client, number, size=4096):
        memory = bytearray(size)
        return client.get([key(number)], [memory])[0] and bytes(memory)

    # --- what is there and what is not

    def test_what_was_put_comes_back_and_what_was_not_is_a_miss(self):
        client = self.client(self.store().address)
        sizes = [1, 2, 150, 4095, 65536, 1 << 20, (3 << 20) + 1]
        keys, values = [key(size) for size in sizes], [block(size, size) for size in sizes]
        self.assertEqual(client.exists(keys), [False] * len(sizes))
        self.assertEqual(client.put(keys, values), [True] * len(sizes))
        memory = [bytearray(size) for size in sizes]
        mixed = [one for pair in zip(keys, map(key, "abcdefg")) for one in pair]
        into = [one for room in memory for one in (room, bytearray(10))]
        self.assertEqual(client.exists(mixed), [True, False] * len(sizes))
        self.assertEqual(client.get(mixed, into), [True, False] * len(sizes))
        self.assertEqual([bytes(one) for one in memory], values)
        self.assertEqual(client.counts()["hits"], len(sizes))

    def test_a_batch_may_be_of_any_size_also_of_none(self):
        client = self.client(self.store(memory_mib=128).address)  # 4 KiB for each at least
        self.assertEqual((client.exists([]), client.put([], []), client.get([], [])), ([], [], []))
        keys = [key(i) for i in range(20000)]
        self.assertTrue(all(client.put(keys, [one for one in keys])))
        memory = bytearray(32 * len(keys))
        view = memoryview(memory)
        self.assertTrue(all(client.get(keys, [view[32 * i:32 * i + 32] for i in range(len(keys))])))
        self.assertEqual(bytes(memory), b"".join(keys))

    def test_memory_of_any_kind(self):
        client = self.client(self.store().address)
        self.assertEqual(client.put([key(1)], [array.array("d", [1.5, 2.5])]), [True])
        numbers = array.array("f", [0] * 4)
        self.assertEqual(client.get([key(1)], [memoryview(numbers)]), [True])
        self.assertEqual(numbers.tobytes(), array.array("d", [1.5, 2.5]).tobytes())
        with self.assertRaises(ValueError):
            client.get([key(1)], [])
        with self.assertRaises(TypeError):
            client.get([key(1)], [bytes(16)])  # nobody can write there
        self.assertEqual(self.read(client, 1, 16), numbers.tobytes())

    def test_another_size_is_a_miss_and_the_next_is_not(self):
        client = self.client(self.store().address)
        client.put([key(1), key(2)], [block(1, 200000), block(2)])
        memory = bytearray(4096)
        self.assertEqual(client.get([key(1), key(2)], [bytearray(4096), memory]), [False, True])
        self.assertEqual(bytes(memory), block(2))
        self.assertEqual(client.counts()["corrupt"], 1)

    def test_a_store_that_is_full_forgets_and_never_mixes_up(self):
        client = self.client(self.store(memory_mib=1).address)
        for first in range(0, 1000, 100):
            client.put([key(i) for i in range(first, first + 100)], [block(i) for i in range(first, first + 100)])
        found = [self.read(client, i) for i in range(1000)]
        self.assertTrue(all(one in (False, block(i)) for i, one in enumerate(found)))
        self.assertLess(0, sum(map(bool, found)))
        self.assertGreater(1000, sum(map(bool, found)))
        self.assertEqual(client.put([key("large")], [bytes(2 << 20)]), [False])

    # --- wrong bytes

    # Promise(python): A flipped bit on the way from a store is found | a CRC-32 seeded with the
    #   name
    def test_a_bit_flipped_on_either_way_is_never_believed(self):
        store, dice, flip = self.store(), random.Random(1), Flip()
        between = self.between(store, change=flip)
        client = self.client(between.address, silence=0.1, timeout=0.3)
        missed = 0
        for number in range(200):
            self.assertTrue(client.here(PATIENCE))
            flip.arm(number % 2 == 0, dice.randrange(8 * 4096))
            client.put([key(number)], [block(number)])
            until(lambda: client.here(1))
            flip.arm(number % 3 == 0, dice.randrange(8 * (186 if number % 3 == 0 else 4000)))
            found = self.read(client, number)
            self.assertIn(found, (False, block(number)))
            missed += found is False
            flip.disarm()
        self.assertGreater(missed, 100)
        # And what is damaged in the store is written anew by whoever computes it.
        until(lambda: client.here(1) and all(client.put([key(1), key(2)], [block(1), block(2)])))
        until(lambda: client.here(1) and self.read(client, 1) == block(1) and self.read(client, 2) == block(2))

    def test_a_store_that_gives_another_ones_block_is_not_believed(self):
        store = self.store()
        swap = [False]

        def change(data, to_store):
            if swap[0] and to_store:
                return data.replace(key(1).hex().encode(), key(2).hex().encode())
            return data

        between = self.between(store, change=change)
        client = self.client(between.address)
        client.put([key(1), key(2)], [block(1), block(2)])
        swap[0] = True
        self.assertIs(self.read(client, 1), False)
        self.assertEqual(self.read(client, 2), block(2))

    # --- a store that is not there

    def test_a_store_that_is_killed_has_nothing_and_is_used_again_when_it_is_back(self):
        store = self.store()
        client = self.client(store.address)
        client.put([key(1)], [block(1)])
        store.kill()
        self.assertEqual((self.read(client, 1), client.exists([key(1)]), client.put([key(1)], [block(1)])),
                         (False, [False], [False]))
        store.start()
        self.assertTrue(client.here(PATIENCE))
        self.assertIs(self.read(client, 1), False)
        self.assertEqual(client.put([key(1)], [block(1)]), [True])
        self.assertEqual(self.read(client, 1), block(1))

    def test_a_store_that_was_started_again_while_nobody_looked_is_used_at_once(self):
        store = self.store()
        client = self.client(store.address)
        client.put([key(1)], [block(1)])
        store.kill()
        store.start()
        self.assertEqual(client.put([key(1)], [block(1)]), [True])
        self.assertEqual(client.counts()["silences"], 0)

    def test_a_store_that_is_stopped_costs_one_silence_and_is_used_again_when_it_goes_on(self):
        store = self.store()
        client = self.client(store.address, silence=0.3)
        until(lambda: client.put([key(1)], [block(1)]) == [True])
        silences = client.counts()["silences"]
        store.stop()
        self.assertIs(self.read(client, 1), False)  # a hang is the test's time limit's to find
        self.assertFalse(client.here())
        for _ in range(1000):
            self.assertEqual((self.read(client, 1), client.exists([key(1)]), client.put([key(1)], [block(1)])),
                             (False, [False], [False]))
        self.assertEqual(client.counts()["silences"], silences + 1)
        store.go_on()
        until(lambda: self.read(client, 1) == block(1))

    def test_what_comes_after_the_deadline_is_not_written(self):
        store = self.store()
        self.client(store.address).put([key(1), key(2)], [block(1, 1 << 20), block(2, 1 << 20)])
        passed, hold = [0], [False]

        def change(data, to_store):
            passed[0] += 0 if to_store else len(data)
            return None if hold[0] and passed[0] > (3 << 19) else data

        between = self.between(store, change=change)
        client = self.client(between.address, silence=1)
        hold[0] = True
        memory = [bytearray(1 << 20), bytearray(1 << 20)]
        self.assertEqual(client.get([key(1), key(2)], memory), [True, False])
        self.assertEqual(bytes(memory[0]), block(1, 1 << 20))
        left = bytes(memory[1])
        hold[0] = False
        between.go_on()
        until(lambda: client.get([key(1)], [bytearray(1 << 20)]) == [True])
        self.assertEqual(bytes(memory[1]), left)

    def test_a_store_that_dribbles_has_no_more_than_the_deadline(self):
        store = self.store()
        self.client(store.address).put([key(1)], [block(1, 1 << 20)])
        slow = [False]

        def change(data, to_store):
            if slow[0] and not to_store:
                time.sleep(0.05)  # with this, 1 MiB takes longer than the deadline and no silence is long
            return data

        between = self.between(store, change=change)
        client = self.client(between.address, silence=PATIENCE, timeout=PATIENCE + 1)
        self.assertEqual(self.read(client, 1, 1 << 20), block(1, 1 << 20))
        client = self.client(between.address, silence=0.39, timeout=0.4)
        slow[0] = True
        self.assertIs(self.read(client, 1, 1 << 20), False)

    def test_nobody_and_somebody_else_at_the_address(self):
        for answer in (None, b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", b""):
            with socket.create_server(("127.0.0.1", 0)) as other:
                address = f"127.0.0.1:{other.getsockname()[1]}"
                called = threading.Event()

                def serve():
                    for _ in range(2):
                        one = other.accept()[0]
                        one.sendall(answer or b"")
                        one.close()
                    called.set()

                thread = threading.Thread(target=serve)
                if answer is None:
                    other.close()
                else:
                    thread.start()
                client = self.client(address, here=False)
                if answer is not None:
                    self.assertTrue(called.wait(PATIENCE))
                    thread.join()
                self.assertEqual((self.read(client, 1), client.put([key(1)], [block(1)])), (False, [False]))
                client.close()
        for nonsense in ("", "host", "host:", ":0", "host:70000", "host:port"):
            with self.assertRaises(ValueError):
                KvStore(nonsense)
        for limits in ({"silence": 0}, {"retry": -1}, {"silence": 5, "timeout": 5}):
            with self.assertRaises(ValueError):
                KvStore("127.0.0.1:1", **limits)

    def test_close_ends_what_runs(self):
        store = self.store()
        client = self.client(store.address)
        client.put([key(1)], [block(1)])
        store.stop()
        got = []
        reader = threading.Thread(target=lambda: got.append(self.read(client, 1)))
        reader.start()
        until(lambda: client._busy)
        client.close()
        reader.join()
        self.assertEqual(got, [False])
        self.assertEqual(client.exists([key(1)]), [False])

    # --- many at once

    def test_threads_while_the_store_is_killed_stopped_and_started(self):
        store = self.store()
        client, wrong, hits, stop = self.client(store.address, silence=0.2), [], [0], threading.Event()

        def work(seed):
            dice = random.Random(seed)
            while not stop.is_set():
                numbers = [dice.randrange(50) for _ in range(20)]
                client.put([key(i) for i in numbers], [block(i) for i in numbers])
                memory = [bytearray(4096) for _ in numbers]
                for i, right, room in zip(numbers, client.get([key(i) for i in numbers], memory), memory):
                    hits[0] += right
                    if right and bytes(room) != block(i):
                        wrong.append(i)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for one in threads:
            one.start()
        for turn in range(6):
            seen = hits[0]
            until(lambda: hits[0] > seen + 200)
            if turn % 2:
                store.kill()
                until(lambda: not client.here())
                store.start()
            else:
                store.stop()
                until(lambda: not client.here())
                store.go_on()
        stop.set()
        for one in threads:
            one.join()
        self.assertEqual(wrong, [])


class Name(unittest.TestCase):
    """What blocks are called."""

    def test_every_field_counts_and_none_runs_into_the_next(self):
        seen = set()
        fields = ("weights", "tokenizer", "dtype", "layout", "shard", "adapter", "salt")
        for field in fields:
            for value in ("a", "b", "ab", "a\0", ""):
                said = dict.fromkeys(fields, "x")
                said[field] = value
                if said["weights"]:
                    seen.add(Names(**said).key(b"1"))
        self.assertEqual(len(seen), 5 * 7 - 1)
        names = Names("w")
        keys = {names.key(b"1"), names.key(b"2"), names.key(b""), names.key(b"1", ""), names.key(b"1", "x"),
                names.key(b"1", "x", ""), names.key(b"1", "", "x"), Names("w", "a").key(b"1"), Names("wa").key(b"1"),
                Names("w", "", "a").key(b"1")}
        self.assertEqual(len(keys), 10)
        self.assertEqual(names.key(b"1"), Names("w").key(b"1"))

    def test_configuration(self):
        self.assertEqual(names_of({"weights": "w", "salt": "s"}).key(b"1"), Names("w", salt="s").key(b"1"))
        self.assertEqual(names_of({"weights": "w"}, dtype="d").key(b"1"), Names("w", dtype="d").key(b"1"))
        both = names_of({"weights": "w", "dtype": "e"}, dtype="d").key(b"1")
        self.assertNotIn(both, (Names("w", dtype="d").key(b"1"), Names("w", dtype="e").key(b"1")))
        for wrong in ({}, {"weight": "w"}, {"weights": ""}, {"model": "/nowhere/at/all"}):
            with self.assertRaises(ValueError):
                names_of(wrong)


if __name__ == "__main__":
    signal.alarm(500)  # a hang says where
    unittest.main()
