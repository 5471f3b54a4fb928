"""baton.Window: ranks are forked processes, as in communicator_test.py."""
import asyncio
import gc
import unittest

import numpy as np

import baton
from communicator_test import processes

PROVIDERS = ("shm", "tcp")


def over(provider, body, n=2):
    def main(rank, address):
        with baton.Endpoint(providers=[provider]) as endpoint:
            with baton.Communicator(rank, n, address, endpoint=endpoint) as comm:
                body(comm)
                comm.barrier()

    with baton.Rendezvous(n) as server:
        processes(n, lambda rank: main(rank, server.address))


class Window(unittest.TestCase):
    # Promise(python): Windows put, get and signal arrays; a signal is behind what was put | the library's, with arrays kept
    #   until their access has ended
    def test_puts_gets_and_signals(self):
        def body(comm):
            other = 1 - comm.rank
            for memory in (None, np.zeros(40000, np.uint8)):
                window = baton.Window(comm, memory, size=0 if memory is not None else 40000, signals=2)
                self.assertEqual(window.size(other), 40000)
                sent = np.arange(10000, dtype=np.int32) + comm.rank
                window.put_async(sent, other)
                window.put(sent[:1].copy(), other, 0, add=2, slot=1)
                window.signal(other, slot=1)
                window.wait_signal(other, 3, slot=1)
                self.assertEqual(window.signal_value(other, 1), 3)
                np.testing.assert_array_equal(np.frombuffer(window.memory, np.int32), np.arange(10000) + other)
                window.flush()
                got = np.zeros(5000, np.int32)
                self.assertIs(window.get(got, other, 20000), got)
                np.testing.assert_array_equal(got, sent[5000:])
                asyncio.run(self.awaits(window, comm, other))
                comm.barrier()
                window.close()

        for provider in PROVIDERS:
            over(provider, body)

    @staticmethod
    async def awaits(window, comm, other):
        ended = []
        wait = window.wait_signal_async(other, 1, on_end=lambda work, error: ended.append((work, error)))
        await window.signal_async(other)
        await wait
        assert ended == [(wait, None)], ended

    def test_are_viewed_where_they_can_be_mapped(self):
        def body(comm):
            window = baton.Window(comm, size=100)
            window.memory[:3] = b"%d!!" % comm.rank
            comm.barrier()
            if "shm" in comm.routes():
                view = window.view(1 - comm.rank)
                self.assertEqual(bytes(view[:3]), b"%d!!" % (1 - comm.rank))
                with self.assertRaises(TypeError):
                    view[0] = 1
                with self.assertRaisesRegex(baton.InvalidParamError, "1 views of the window are held"):
                    window.close()
                del view
                gc.collect()
            else:
                with self.assertRaisesRegex(baton.NotSupportedError, "cannot be mapped here"):
                    window.view(1 - comm.rank)
            comm.barrier()
            window.close()

        for provider in PROVIDERS:
            over(provider, body)

    def test_refuses_what_makes_no_sense(self):
        def body(comm):
            refuses = self.assertRaisesRegex
            window = baton.Window(comm, size=100)
            for what, wrong in (
                    ("window has 100 bytes", lambda: window.put(b"ab", 1, 99)),
                    ("offset", lambda: window.put(b"ab", 1, -1)),
                    ("4294967296 is no rank", lambda: window.size(1 << 32)),
                    ("4294967296 is no rank", lambda: window.signal_value(1 << 32)),
                    ("4294967297 is no rank", lambda: window.view((1 << 32) + 1)),
                    ("data holds Python objects", lambda: window.put(np.array([comm]), 1)),
                    ("read-only", lambda: window.get(b"ab", 1)),
                    ("not contiguous", lambda: window.put(np.zeros((4, 4))[:, 0], 1)),
                    ("not both", lambda: baton.Window(comm, bytearray(1), size=1)),
                    ("1 to 64", lambda: baton.Window(comm, size=1, signals=65))):
                with refuses(baton.InvalidParamError, what):
                    wrong()
            with refuses(baton.CancelledError, "to be 1.*deadline has passed"):
                window.wait_signal(1 - comm.rank, 1, timeout=1e-3)
            comm.barrier()
            window.close()
            with refuses(baton.InvalidParamError, "window is closed"):
                window.signal(0)

        over("shm", body)

    # The library has room for 256 works; those that nothing waits for are not in the way.
    def test_many_at_a_time(self):
        def body(comm):
            with baton.Window(comm, size=1000) as window:
                for i in range(1000):
                    window.put_async(bytes([i % 256]), 1 - comm.rank, i, add=1)
                window.wait_signal(1 - comm.rank, 1000)
                self.assertEqual(bytes(window.memory), bytes(i % 256 for i in range(1000)))
                window.flush()
                comm.barrier()

        over("shm", body)


if __name__ == "__main__":
    unittest.main()
