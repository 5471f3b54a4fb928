"""KvConnector between two engines: pushed and pulled, awaited, bound by a key, and given up."""
import asyncio
import concurrent.futures
import contextlib
import unittest
from unittest import mock

import numpy

import baton
from helpers import in_child

LAYERS, HEADS, SIZE = 4, 2, 8
MODEL = "sha256:of the test"
TOKENS = list(range(5, 105))
BLOCKS = [9, 4, 11, 2]  # of decode, of 32 tokens


class Cache:
    """K and V of some layers; what `of` a token is, both sides know."""

    def __init__(self, blocks, tokens, order):
        self.tokens = tokens
        shape = (2, blocks, tokens, HEADS, SIZE) if order == "NHD" else (2, blocks, HEADS, tokens, SIZE)
        self.tensors = [numpy.zeros(shape, numpy.uint16) for _ in range(LAYERS)]
        self.layout = baton.KvLayout(MODEL).add_paged(self.tensors, blocks=blocks, block_tokens=tokens, heads=HEADS,
                                                      head_size=SIZE, dtype="bfloat16", order=order, pair="stacked")
        self.views = [tensor if order == "NHD" else tensor.swapaxes(2, 3) for tensor in self.tensors]

    def compute(self, layer, blocks, tokens):
        """The KV of these tokens, into these blocks."""
        for i, token in enumerate(tokens):
            self.views[layer][:, blocks[i // self.tokens], i % self.tokens] = self.of(layer, token)

    def holds(self, layer, blocks, tokens):
        return all((self.views[layer][:, blocks[i // self.tokens], i % self.tokens] == self.of(layer, token)).all()
                   for i, token in enumerate(tokens))

    @staticmethod
    def of(layer, token):
        return token * 31 + layer * 7 + 1


class Two(unittest.TestCase):
    """Prefill and decode in one process, with caches of other blocks and another order."""

    def setUp(self):
        self.prefill, self.decode = baton.KvConnector("prefill", allow_pull=True), baton.KvConnector("decode")
        self.there, self.here = Cache(32, 16, "NHD"), Cache(16, 32, "HND")
        self.prefill.register_cache(self.there.layout)
        self.decode.register_cache(self.here.layout)
        self.addCleanup(self.decode.close)
        self.addCleanup(self.prefill.close)
        self.pages = [7, 3, 30, 12, 0, 5, 21]  # of prefill, of 16 tokens

    def load(self, **how):
        return self.decode.load(self.prefill.address, TOKENS, BLOCKS, **how)

    def wait_for_job(self, load=None):
        """Of that load: what comes of others was given up."""
        while True:
            job = self.prefill.next_job()
            if job is not None and load in (None, job.request):
                return job
            if job is not None:
                job.finish(error="nobody wants it")
                job.wait_saved(60)
            with contextlib.suppress(baton.BatonTimeoutError):
                self.prefill.wait(1)

    def check(self, layers=range(LAYERS)):
        for layer in layers:
            self.assertTrue(self.here.holds(layer, BLOCKS, TOKENS), layer)

    def test_layer_by_layer_both_ways(self):
        for pull in (False, True):
            with self.subTest(pull=pull):
                for tensor in self.here.tensors:
                    tensor[:] = 0
                with self.load(pull=pull, key="request 1") as load:
                    job = self.wait_for_job()
                    self.assertEqual((job.tokens, job.decode, job.key, job.request), (TOKENS, "decode", "request 1", load.number))
                    self.assertTrue(job.wanted)
                    self.assertIsNone(load.payload())
                    for layer in range(LAYERS):
                        self.assertEqual(load.layers, layer)
                        self.assertFalse(load.done())
                        self.there.compute(layer, self.pages, TOKENS)
                        job.save_layer(layer, self.pages[:3])
                        with self.assertRaises(baton.BatonTimeoutError):
                            load.wait(layer, timeout=0)
                        if layer < LAYERS - 1:
                            self.assertEqual(len(load.failed_blocks()), len(BLOCKS))
                        job.save_layer(layer, numpy.array(self.pages[3:]), first_block=3)
                        load.wait(layer, timeout=60)
                        self.check([layer])
                    self.assertFalse(job.is_saved())
                    job.finish(payload=b"token 17, seed 3")
                    load.wait(timeout=60)
                    self.assertEqual(load.failed_blocks(), [])
                    self.assertEqual(asyncio.run(asyncio.wait_for(load, 60)), b"token 17, seed 3")
                self.assertTrue(load.end())
                job.wait_saved(60)
                self.assertTrue(job.is_saved())
                with self.assertRaisesRegex(baton.NotFoundError, "no load"):
                    load.done()
        self.assertEqual(self.decode.stats()["loads_failed"], 0)
        self.assertGreater(self.decode.stats()["bytes_loaded"], 0)
        self.assertIn("prefill", self.decode.route())

    def test_awaited_on_both_sides(self):
        async def engine_there():
            job = await self.prefill.job()
            for layer in range(LAYERS):
                self.there.compute(layer, self.pages, job.tokens)
                job.save_layer(layer, self.pages)
                await asyncio.sleep(0)
            job.finish(payload=b"first token")
            await job.saved()

        async def engine_here():
            async with self.load() as load:
                for layer in range(LAYERS):
                    await load.layer(layer)
                    self.check([layer])
                return await load

        async def both():
            return await asyncio.wait_for(asyncio.gather(engine_there(), engine_here()), 60)

        self.assertEqual(asyncio.run(both())[1], b"first token")

    def test_a_cancelled_wait_for_a_job_loses_none(self):
        """It was taken for a task that is cancelled before it goes on: the next who asks gets it."""
        take = self.prefill.next_job

        async def main():
            first, second = (asyncio.ensure_future(self.prefill.job()) for _ in range(2))
            await asyncio.sleep(0)  # both wait

            def take_and_cancel():
                job = take()
                if job is not None:
                    first.cancel()
                return job

            with self.load() as load, mock.patch.object(self.prefill, "next_job", take_and_cancel):
                with self.assertRaises(asyncio.CancelledError):
                    await asyncio.wait_for(first, 60)
                job = await asyncio.wait_for(second, 60)  # who waits is woken
                self.assertEqual(job.request, load.number)
                job.finish(error="seen")
            third = first = asyncio.ensure_future(self.prefill.job())
            await asyncio.sleep(0)
            with self.load() as load, mock.patch.object(self.prefill, "next_job", take_and_cancel):
                with self.assertRaises(asyncio.CancelledError):
                    await asyncio.wait_for(third, 60)
                job = take()  # nobody waits
                self.assertEqual(job.request, load.number)
                job.finish(error="seen")
            self.assertIsNone(take())
        asyncio.run(main())

    def test_timeouts_are_of_the_clock(self):
        """However often others' requests wake who waits."""
        job, rounds, now = self.prefill.bind("never", len(TOKENS)), 0, 0.0

        def busy(*_):
            nonlocal rounds, now
            rounds, now = rounds + 1, now + 0.001

        with mock.patch.object(self.prefill, "_open", mock.Mock(call=busy)), mock.patch("time.monotonic", lambda: now):
            with mock.patch.object(job, "is_saved", lambda: rounds == 4000):
                job.wait_saved(5)  # 4 s by the clock
            with mock.patch.object(job, "is_saved", lambda: False), self.assertRaises(baton.BatonTimeoutError):
                job.wait_saved(5)
            self.assertAlmostEqual(now, 9, delta=0.01)
        job.finish(error="nobody came")

    def test_prefill_is_first(self):
        """What a bound job has saved leaves when its load comes; of two loads each gets it."""
        other = baton.KvConnector("other decode")
        self.addCleanup(other.close)
        cache = Cache(16, 32, "NHD")
        other.register_cache(cache.layout)
        job = self.prefill.bind("request 2", len(TOKENS), loads=2)
        with self.assertRaisesRegex(baton.NotAllowedError, "open already"):
            self.prefill.bind("request 2", len(TOKENS))
        for layer in range(LAYERS):
            self.there.compute(layer, self.pages, TOKENS)
            job.save_layer(layer, self.pages)
        job.finish(payload=b"one")
        job.renew(60)
        with self.load(key="request 2", loads_of_key=2) as load, other.load(
                self.prefill.address, TOKENS, BLOCKS, key="request 2", loads_of_key=2, pull=True) as pulled:
            load.wait()  # for as long as it takes
            pulled.wait(timeout=60)
            self.assertEqual(asyncio.run(asyncio.wait_for(pulled, 60)), b"one")
        self.check()
        self.assertTrue(all(cache.holds(layer, BLOCKS, TOKENS) for layer in range(LAYERS)))
        job.wait_saved(60)
        self.assertIsNone(self.prefill.next_job())

    def test_what_is_given_up(self):
        # By decode.
        load = self.load()
        job = self.wait_for_job()
        job.save_layer(0, self.pages)
        load.wait(0, timeout=60)
        load.close(60)
        while job.wanted:
            with contextlib.suppress(baton.BatonTimeoutError):
                self.prefill.wait(1)
        with self.assertRaises(baton.CancelledError):
            job.save_layer(1, self.pages)
        job.finish(error="not wanted")
        job.wait_saved(60)
        # By prefill, with its reason.
        load = self.load()
        job = self.wait_for_job()
        job.save_layer(0, self.pages)
        job.finish(error=baton.BackendError("out of blocks"))
        with self.assertRaisesRegex(baton.BackendError, "out of blocks"):
            load.wait(timeout=60)
        with self.assertRaisesRegex(baton.BackendError, "out of blocks"):
            asyncio.run(asyncio.wait_for(load, 60))
        self.assertEqual(sorted(load.failed_blocks()), sorted(BLOCKS))
        load.close(60)
        job.wait_saved(60)
        # By nobody: its time runs out, and prefill hears of it; or says so first, where decode's thread comes late.
        with self.load(timeout=0.05) as load:
            with self.assertRaisesRegex(baton.CancelledError, "not complete after 0.05 s"):
                asyncio.run(asyncio.wait_for(load, 60))
        with self.load(timeout=30) as load:  # or is put off
            load.renew(60)
            job = self.wait_for_job(load.number)
            for layer in range(LAYERS):
                job.save_layer(layer, self.pages)
            job.finish()
            load.wait(timeout=60)

    def test_bad_input(self):
        address = self.prefill.address
        for wrong, why in (({"blocks": [16]}, "block"), ({"tokens": []}, "no token"), ({"blocks": [1]}, "block")):
            with self.assertRaises(baton.BatonError) as raised:
                self.decode.load(address, **{"tokens": TOKENS, "blocks": BLOCKS, **wrong}).wait(timeout=60)
            self.assertIn(why, str(raised.exception))
        with self.assertRaisesRegex(baton.InvalidParamError, "32 bits"):
            self.decode.load(address, [2 ** 31], BLOCKS)
        with self.assertRaisesRegex(baton.InvalidParamError, "no source for the KV"):
            self.decode.load("", TOKENS, BLOCKS)
        with self.assertRaisesRegex(baton.InvalidParamError, "timeout is -1"):
            self.load(timeout=-1)
        with self.load(number=77), self.assertRaises(baton.NotAllowedError):
            self.load(number=77)
        with self.assertRaisesRegex(baton.InvalidParamError, "1 to 64 bytes"):
            baton.KvConnector("")
        with self.assertRaisesRegex(baton.NotAllowedError, "KV cache already"):
            self.decode.register_cache(self.here.layout)
        with baton.KvConnector("bare") as bare, self.assertRaisesRegex(baton.NotAllowedError, "register_cache"):
            bare.load(address, TOKENS, BLOCKS)
        with self.assertRaisesRegex(baton.InvalidParamError, "closed"):
            bare.next_job()

    def test_closed_while_threads_and_loops_wait(self):
        load = self.load()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            waits = [pool.submit(how) for how in (
                load.wait, self.decode.wait, self.decode.wait, lambda: asyncio.run(load.layer(0)))]
            job = self.wait_for_job()
            job.save_layer(0, self.pages[:1])
            self.decode.close()
        for why in filter(None, (one.exception() for one in waits)):
            self.assertIsInstance(why, baton.InvalidParamError)
            self.assertIn("closed", str(why))
        load.close = None  # nothing of it is left

    def test_a_forked_child_has_none(self):
        def child():
            with self.assertRaisesRegex(baton.InvalidParamError, "forked"):
                self.decode.next_job()

        in_child(child)
        with self.load() as load:
            job = self.wait_for_job()
            for layer in range(LAYERS):
                job.save_layer(layer, self.pages)
            job.finish()
            load.wait(timeout=60)


if __name__ == "__main__":
    unittest.main()
