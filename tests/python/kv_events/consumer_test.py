"""What `baton serve` publishes of its prefix cache, heard by a consumer as they are written for vLLM: with pyzmq, and
decoded by vLLM's own classes where this Python has vLLM (else by msgpack).

usage: consumer_test.py BATON MODEL"""
import json
import pathlib
import re
import signal
import subprocess
import sys
import unittest
import urllib.request

try:
    import zmq
except ImportError:
    print("skipped: this needs pyzmq (Debian: python3-zmq)")
    sys.exit(77)
try:
    import msgspec
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
    DECODE = msgspec.msgpack.Decoder(type=KVEventBatch).decode
except ImportError:
    try:
        import msgpack
    except ImportError:
        print("skipped: this needs vLLM, or msgpack (Debian: python3-msgpack)")
        sys.exit(77)

    class Event:
        """A map as an object, of the class that its type names."""

        def __init__(self, fields):
            self.__dict__.update(fields)

    class BlockStored(Event):
        pass

    class BlockRemoved(Event):
        pass

    class AllBlocksCleared(Event):
        pass

    class KVEventBatch:
        def __init__(self, payload):
            kinds = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}
            self.ts, events, self.data_parallel_rank = msgpack.unpackb(payload, raw=False)
            self.events = [kinds[event["type"]](event) for event in events]

    DECODE = KVEventBatch

BATON, MODEL = sys.argv[1], pathlib.Path(sys.argv[2])
PATIENCE = 600_000  # ms: CTest's timeout is shorter
END = (-1).to_bytes(8, "big", signed=True)


class Serve:
    """`baton serve` with events on ports of its own choice."""

    def __init__(self, blocks):
        config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:0",
                  "replay_endpoint": "tcp://*:0", "topic": "kv-events", "buffer_steps": 10000}
        self.process = subprocess.Popen(
            [BATON, "serve", "--model", MODEL, "--port", "0", "--blocks", str(blocks), "--kv-events-config",
             json.dumps(config)], stdout=subprocess.PIPE, text=True)
        lines = iter(self.process.stdout.readline, "")
        ports = re.search(r"KV events: published at tcp://[^:]*:(\d+), replayed at tcp://[^:]*:(\d+)",
                          next(line for line in lines if line.startswith("KV events")))
        self.events, self.replay = (f"tcp://127.0.0.1:{port}" for port in ports.groups())
        self.url = next(line for line in lines if line.startswith("ready")).split(" on ")[1].strip()

    def complete(self, tokens, count=4):
        """The whole of what it has then."""
        body = {"prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        ask = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
        with urllib.request.urlopen(ask) as answer:
            return tokens + json.load(answer)["choices"][0]["token_ids"]

    def close(self):
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait()
        self.process.stdout.close()
        return status


def prompt(kind, length):
    return [(kind * 37 + i * i) % 200 + 260 for i in range(length)]


class Consumer:
    def __init__(self, server, context):
        self.sub, self.dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        for socket in (self.sub, self.dealer):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, PATIENCE)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, "kv-events")
        self.sub.connect(server.events)
        self.dealer.connect(server.replay)
        self.live, self.held = [], {}

    def close(self):
        self.sub.close()
        self.dealer.close()

    def replayed(self, first):
        """[(number, payload), ...]"""
        self.dealer.send_multipart((b"", first.to_bytes(8, "big")))
        out = []
        while True:
            empty, topic, number, payload = self.dealer.recv_multipart()
            if number == END:
                assert (empty, topic, payload) == (b"", b"", b""), (empty, topic, payload)
                return out
            assert (empty, topic) == (b"", b"kv-events"), (empty, topic)
            out.append((int.from_bytes(number, "big"), payload))

    def next(self):
        topic, number, payload = self.sub.recv_multipart()
        assert topic == b"kv-events", topic
        self.live.append((int.from_bytes(number, "big"), payload))
        return payload

    def apply(self, payload):
        """What is cached: the hash of each block, and its tokens from the prompt's beginning on."""
        batch = DECODE(payload)
        assert batch.data_parallel_rank == 0 and batch.ts > 1.7e9, batch
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.held.clear()
            elif isinstance(event, BlockRemoved):
                assert event.medium == "GPU", event
                for one in event.block_hashes:
                    del self.held[one]  # it was there
            else:
                assert isinstance(event, BlockStored) and event.medium == "GPU", event
                assert event.block_size == 16 and event.lora_id is None and event.lora_name is None, event
                tokens = self.held[event.parent_block_hash] if event.parent_block_hash else []
                assert len(event.token_ids) == 16 * len(event.block_hashes), event
                for i, one in enumerate(event.block_hashes):
                    assert isinstance(one, bytes) and one not in self.held, one
                    tokens = tokens + event.token_ids[16 * i:16 * i + 16]
                    self.held[one] = tokens


class ConsumerTest(unittest.TestCase):
    def setUp(self):
        self.server, self.context = Serve(blocks=24), zmq.Context()

    def tearDown(self):
        self.context.destroy(linger=0)
        self.assertEqual(self.server.close(), 0)

    def test_what_it_publishes_is_what_it_has_cached(self):
        consumer = Consumer(self.server, self.context)
        # The first batch is in the buffer before anybody is there.
        (number, first), = consumer.replayed(0)
        self.assertEqual(number, 0)
        self.assertIsInstance(DECODE(first).events[0], AllBlocksCleared)
        # Until the subscription is there, what comes is in the buffer alone: ask until one is heard. That may be the
        # first batch: it is in the buffer before it is sent.
        sent = [self.server.complete(prompt(0, 40))]
        while not consumer.sub.poll(20):
            sent.append(self.server.complete(prompt(len(sent), 40)))
        consumer.next()
        told = []
        while sent[-1][:32] not in consumer.held.values():
            for number, payload in consumer.replayed(len(told)):
                told.append((number, payload))
                consumer.apply(payload)
        while consumer.live[-1][0] < told[-1][0]:
            consumer.next()
        # From here on live: prompts of which the cache has room for few, so that blocks are removed.
        live, begin = [], told[-1][0] + 1
        for i in range(12):
            whole = self.server.complete(prompt(100 + i, 100))
            want = whole[:(len(whole) - 1) // 16 * 16]
            while want not in consumer.held.values():
                live.append(consumer.next())
                consumer.apply(live[-1])
            for end in range(16, len(want) + 1, 16):
                self.assertIn(want[:end], consumer.held.values())
            self.assertLessEqual(len(consumer.held), 24)
        removed = sum(isinstance(event, BlockRemoved) for payload in live for event in DECODE(payload).events)
        self.assertGreater(removed, 5)
        numbers = [number for number, _ in consumer.live]
        self.assertEqual(numbers, list(range(numbers[0], numbers[0] + len(numbers))))
        # A replay gives the same bytes again, and another consumer makes the same of them.
        again = consumer.replayed(begin)
        self.assertEqual([payload for _, payload in again][:len(live)], live)
        other = Consumer(self.server, self.context)
        for _, payload in other.replayed(0):
            other.apply(payload)
        self.assertEqual(other.held, consumer.held)
        with urllib.request.urlopen(self.server.url + "/metrics") as page:
            self.assertRegex(page.read().decode(), r"\nbaton_kv_event_batches_total [1-9]\d*\n")
        consumer.close()
        other.close()


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
