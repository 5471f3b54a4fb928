"""baton.Experts: ranks are forked processes, as in window_test.py."""
import asyncio
import unittest

import numpy as np

import baton
from window_test import PROVIDERS, over


def mixture(rows, chosen, weights):
    """What experts say on one rank: expert e says row * (e + 1); sums in ascending number, one rounding each but the first."""
    out = np.zeros_like(rows)
    for token, row in enumerate(rows):
        total = None
        for expert, weight in sorted(zip(chosen[token], weights[token])):
            if expert < 0:
                continue
            said = (row * np.float32(expert + 1)).astype(np.float32)
            # Products of two floats are exact in double; so is their sum with a third, nearly always.
            total = said * weight if total is None else (said.astype(np.float64) * weight + total).astype(np.float32)
        out[token] = 0 if total is None else total
    return out


def answer(received, hidden):
    for group in received.groups:
        for slot in range(group.first, group.first + group.count):
            row = np.frombuffer(received.row(slot), np.float32)
            np.frombuffer(received.output(slot), np.float32)[:] = row * np.float32(group.expert + 1)


class Experts(unittest.TestCase):
    # Promise(python): Experts take numpy arrays and torch tensors, and give the sums of one rank | random routings beside numpy
    def test_rounds_give_the_sums_of_one_rank(self):
        def body(comm):
            random = np.random.default_rng(comm.rank)
            with baton.Experts(comm, experts=8, top_k=3, hidden=40, max_tokens=20, dtype="float32") as experts:
                for tokens in (20, 0, 7, 1):
                    rows = random.integers(-50, 50, (tokens, 40)).astype(np.float32)
                    chosen = np.array([random.permutation(8)[:3] for _ in range(tokens)], np.int32).reshape(tokens, 3)
                    chosen[random.random(chosen.shape) < 0.1] = -1
                    weights = (random.integers(-8, 8, chosen.shape) / 8).astype(np.float32)
                    received = experts.dispatch(rows, chosen)
                    self.assertEqual([g.expert for g in received.groups], list(range(4 * comm.rank, 4 * comm.rank + 4)))
                    answer(received, 40)
                    out = np.full_like(rows, 7)
                    self.assertIs(experts.combine(received, weights, out), out)
                    np.testing.assert_array_equal(out, mixture(rows, chosen, weights))
                    self.assertEqual(experts.missing(), [])
                    with self.assertRaisesRegex(baton.InvalidParamError, "combined"):
                        experts.combine(received, weights, out)

        for provider in PROVIDERS:
            over(provider, body)

    # Promise(python): Experts' rounds can be awaited, several at a time, and tell a callback their end | as calls of communicators
    def test_rounds_are_awaited(self):
        def body(comm):
            random = np.random.default_rng(comm.rank)
            told = []

            async def one(experts):
                rows = random.integers(-50, 50, (6, 40)).astype(np.float32)
                chosen = np.array([random.permutation(4)[:2] for _ in rows], np.int32)
                weights = (random.integers(-8, 8, chosen.shape) / 8).astype(np.float32)
                received = await experts.dispatch_async(rows, chosen, on_end=lambda work, error: told.append((work.name, error)))
                answer(received, 40)
                out = np.zeros_like(rows)
                work = experts.combine_async(received, weights, out, on_end=lambda work, error: told.append((work.name, error)))
                del received
                self.assertIs(await asyncio.create_task(work), out)
                self.assertTrue(work.done() and work.wait() is out and work.result is out and not work.missing)
                np.testing.assert_array_equal(out, mixture(rows, chosen, weights))

            async def all_of(experts):
                for _ in range(5):
                    await asyncio.gather(one(experts), one(experts))

            with baton.Experts(comm, experts=4, top_k=2, hidden=40, max_tokens=6, dtype="float32", in_flight=2) as experts:
                asyncio.run(all_of(experts))
                self.assertEqual(sorted(told), 10 * [("combine", None)] + 10 * [("dispatch", None)])

        for provider in PROVIDERS:
            over(provider, body)

    def test_a_wait_that_runs_out_leaves_the_round(self):
        def body(comm):
            rows, chosen = np.ones((1, 8), np.float32), np.array([[0, 1]], np.int32)
            with baton.Experts(comm, experts=2, top_k=2, hidden=8, max_tokens=1, dtype="float32") as experts:
                if comm.rank == 1:
                    comm.barrier()
                raised = []

                def on_end(work, error):
                    raised.append(error)
                    raise KeyError("of the callback")

                work = experts.dispatch_async(rows, chosen, on_end)
                if comm.rank == 0:
                    with self.assertRaises(baton.BatonTimeoutError):
                        work.wait(0.01)
                    self.assertFalse(work.done())
                    comm.barrier()
                with self.assertRaisesRegex(KeyError, "of the callback"):
                    work.wait()
                received = work.wait()
                self.assertEqual(raised, [None])
                held = received.row(0)
                with self.assertRaisesRegex(baton.InvalidParamError, "views of rows or outputs are held"):
                    experts.close()
                self.assertEqual(bytes(held), rows.tobytes())
                with self.assertRaisesRegex(baton.InvalidParamError, "combined already"):
                    experts.combine(received, np.ones((1, 2), np.float32), rows)
                comm.barrier()
                del held

        over("shm", body)

    def test_eight_bits_and_bfloat16(self):
        def body(comm):
            rows = (np.arange(2 * 256).reshape(2, 256) % 16).astype(np.float32)
            small = (rows.view(np.uint32) >> 16).astype(np.uint16)
            chosen, weights = np.array([[0], [1]], np.int32), np.ones((2, 1), np.float32)
            with baton.Experts(comm, experts=2, top_k=1, hidden=256, max_tokens=2, fp8=True) as experts:
                received = experts.dispatch(small, chosen)
                for slot in range(len(received.row_of)):
                    row = received.dequantised(slot, np.zeros(256, np.float32))
                    np.testing.assert_allclose(row, rows[comm.rank], rtol=0.07)
                    np.frombuffer(received.output(slot), np.uint16)[:] = small[comm.rank]
                np.testing.assert_array_equal(experts.combine(received, weights, np.zeros_like(small)), small)

        over("shm", body)

    def test_what_makes_no_sense(self):
        def body(comm):
            make = dict(experts=4, top_k=2, hidden=8, max_tokens=4, dtype="float32")
            for change in ({"dtype": "int32"}, {"mode": "fast"}, {"hidden": -1}, {"rank_timeout": 0}):
                with self.assertRaises(baton.InvalidParamError):
                    baton.Experts(comm, **{**make, **change})
            with baton.Experts(comm, **make) as experts:
                rows, chosen = np.zeros((2, 8), np.float32), np.array([[0, 1], [2, 3]], np.int32)
                for bad in ((np.zeros((5, 8), np.float32), np.zeros((5, 2), np.int32)), (rows[:, :7].copy(), chosen),
                            (rows.astype(np.float64), chosen), (rows, chosen.astype(np.int64)), (rows, chosen[:1])):
                    with self.assertRaises(baton.InvalidParamError):
                        experts.dispatch(*bad)
                received = experts.dispatch(rows, chosen)
                with self.assertRaisesRegex(baton.NotAllowedError, "in_flight"):
                    experts.dispatch(rows, chosen)
                for bad in ((chosen, rows.copy()), (np.ones((2, 2), np.float32), rows[:1].copy())):
                    with self.assertRaises(baton.InvalidParamError):
                        experts.combine(received, *bad)
                with self.assertRaisesRegex(baton.InvalidParamError, "slot 99"):
                    received.row(99)
                experts.combine(received, np.ones((2, 2), np.float32), rows)
                with self.assertRaisesRegex(baton.InvalidParamError, "combined"):
                    received.row(0)
            with self.assertRaisesRegex(baton.InvalidParamError, "closed"):
                experts.dispatch(rows, chosen)

        over("shm", body)


if __name__ == "__main__":
    unittest.main()
