"""What a stranger does who has read the signatures only: numbers that do not fit, text that C would cut, masks for
indices, threads that use an agent while it is closed or while the interpreter ends."""
import asyncio
import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
import unittest
from unittest import mock

import numpy

import baton
from baton import _handle
from helpers import Refusing

PAGE, PAGES = 4096, 16
HERE = os.path.dirname(os.path.abspath(__file__))

# Daemon threads are in the middle of calls when the interpreter ends.
AT_THE_END = """
import sys, threading, numpy, baton
provider, what = sys.argv[1:]
mine, theirs = numpy.ones(1 << 20, numpy.uint8), numpy.zeros(1 << 20, numpy.uint8)
a, b = baton.Agent("a", require=provider), baton.Agent("b", require=provider)
a.register(mine), b.register(theirs), a.add_remote(b.metadata())
local = a.prepare([(mine.ctypes.data, 4096, 0, 4096, 256)])
remote = a.prepare([(theirs.ctypes.data, 4096, 0, 4096, 256)], "b")
calls = {"transfers": lambda move: move.post().wait(), "metadata": lambda _: (a.metadata(), a.stats()),
         "messages": lambda _: (a.notify("b", b"x"), b.messages()),
         "lists": lambda _: a.prepare([(mine.ctypes.data, 4096, 0, 4096, 256)])}
begun = [threading.Event() for _ in range(3)]
def use(event):
    move = a.transfer(baton.WRITE, local, range(256), remote, range(256), b"here")
    try:
        while True:
            calls[what](move)
            event.set()
    except baton.BatonError:
        pass  # closed, or the other agent is
for event in begun:
    threading.Thread(target=use, args=(event,), daemon=True).start()
for event in begun:
    event.wait()
"""


class Pair(Refusing):
    def setUp(self):
        self.mine, self.theirs = numpy.arange(PAGE * PAGES, dtype=numpy.uint8), numpy.zeros(PAGE * PAGES, numpy.uint8)
        self.a, self.b = baton.Agent("a"), baton.Agent("b")
        self.addCleanup(self.a.close)
        self.addCleanup(self.b.close)
        self.a.register(self.mine)
        self.b.register(self.theirs)
        self.a.add_remote(self.b.metadata())
        self.local = self.a.prepare([(self.mine.ctypes.data, PAGE, 0, PAGE, PAGES)])
        self.remote = self.a.prepare([(self.theirs.ctypes.data, PAGE, 0, PAGE, PAGES)], "b")


class Words(Pair):
    def test_indices_are_whole_numbers(self):
        def write(indices):
            return self.a.transfer(baton.WRITE, self.local, indices, self.remote, [0, 1])
        for wrong in (numpy.array([0.9, 1.7]), numpy.array([numpy.nan, 1]), [0.5, 1],
                      "01", iter("01"), numpy.array(["0", "1"]), [None, 1]):
            self.refused(TypeError, lambda: write(wrong))
        for mask in (numpy.array([True, False]), [True, False], iter([True, False])):
            self.refused(TypeError, lambda: write(mask), "mask")
        self.refused(baton.InvalidParamError, lambda: self.a.transfer(baton.WRITE, self.local, numpy.array([]),
                                                                      self.remote, []))
        for right in (numpy.array([2, 1], numpy.uint8), numpy.array([2.0, 1.0]), [2, 1],
                      (2, 1), iter([2, 1]), map(numpy.int32, [2, 1])):
            self.theirs[:] = 0
            write(right).post().wait()
            self.assertTrue((self.theirs[:2 * PAGE] == self.mine.reshape(PAGES, PAGE)[[2, 1]].ravel()).all())
        self.assertFalse(self.theirs[2 * PAGE:].any())

    def test_text_is_not_cut_where_c_would_end_it(self):
        self.refused(baton.InvalidParamError, lambda: baton.Agent("a\0b"), "zero byte")
        for call in (lambda: self.a.notify("b\0c", b"for whom?"), lambda: self.a.has_remote("b\0c"),
                     lambda: self.a.prepare([(self.theirs.ctypes.data, 1, 0)], b"b\0"),
                     lambda: self.a.remove_remote("b\0"), lambda: self.a.connect("b\0"),
                     lambda: self.a.explain("b\0"), lambda: self.a.fetch_metadata("b", "127.0.0.1:1\0"),
                     lambda: self.a.follow_metadata("b", "x\0"), lambda: self.a.publish_metadata(label="x\0")):
            self.refused(baton.InvalidParamError, call, "zero byte")
        for option in ("require", "key_file", "listen_host", "metadata_store"):
            self.refused(baton.InvalidParamError, lambda: baton.Agent("c", **{option: "shm\0"}), option)
        self.assertTrue(self.a.has_remote("b"))
        self.assertEqual(self.b.messages(), [])
        self.refused(TypeError, lambda: baton.Agent(5), "name is text, not int")

    def test_options_are_not_what_is_left_of_a_number(self):
        for option, wrong in (("listen_port", (-1, 70000)), ("max_transfers", (-1, 2 ** 32 + 5)),
                              ("metadata_lease", (-1, 1e9))):
            for value in wrong:
                self.refused(baton.InvalidParamError, lambda: baton.Agent("c", **{option: value}), option)


class Silence(unittest.TestCase):
    """The other agent is stopped: what is asked of it stays under way."""

    def setUp(self):
        self.child = subprocess.Popen([sys.executable, os.path.join(HERE, "peer.py"), "b", "tcp"],
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.addCleanup(self.child.stdout.close)
        self.addCleanup(self.child.stdin.close)
        self.addCleanup(self.child.wait)
        self.addCleanup(self.child.kill)
        metadata, address = bytes.fromhex(self.child.stdout.readline().decode()), int(self.child.stdout.readline())
        # No patience of the product ends the transfer before the test does.
        self.a = baton.Agent("a", require="tcp", settings={"tcp.stall_ms": 3_600_000})
        self.addCleanup(self.a.close)
        self.memory = numpy.zeros(PAGE * 256, numpy.uint8)
        self.a.register(self.memory)
        self.a.add_remote(metadata)
        self.local = self.a.prepare([(self.memory.ctypes.data, PAGE, 0, PAGE, 256)])
        self.remote = self.a.prepare([(address, PAGE, 0, PAGE, 256)], "b")
        self.a.read(self.local, [0], self.remote, [0]).wait()
        os.kill(self.child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.child.pid, os.WSTOPPED)
        self.move = self.a.read(self.local, range(256), self.remote, range(256))

    def test_no_time_is_no_time(self):
        for seconds in (0, -1e-9, -1, -1e300):  # -1 ns is C's word for ever
            with self.assertRaises(baton.BatonTimeoutError):
                self.move.wait(seconds)
        with self.assertRaises(ValueError):
            self.move.wait(float("nan"))

    def test_an_agent_that_is_closed_tells_who_waits_for_its_transfers(self):
        move = self.move

        async def waits():
            await move

        async def both():
            task = asyncio.ensure_future(waits())
            for _ in range(4):  # it waits now, and has looked once
                await asyncio.sleep(0)
            self.a.close()
            with self.assertRaises(baton.InvalidParamError) as raised:
                await task
            self.assertIn("closed", str(raised.exception))

        asyncio.run(both())

    def test_an_agent_that_is_closed_tells_so_where_somebody_else_has_read_its_event(self):
        silent, write = os.pipe2(os.O_NONBLOCK)
        self.addCleanup(os.close, silent)
        self.addCleanup(os.close, write)
        with mock.patch.object(_handle.Handle, "with_event_fd", lambda _handle, function: function(silent)):
            self.test_an_agent_that_is_closed_tells_who_waits_for_its_transfers()

    # Promise(python): An agent may be closed, and the interpreter may end, while other threads are
    #   inside calls | calls are counted; waiters are told
    def test_close_waits_until_calls_of_other_threads_have_ended(self):
        begun = threading.Barrier(5)

        def wait(move):
            begun.wait()
            with self.assertRaisesRegex(baton.InvalidParamError, "closed"):
                move.wait()

        others = [self.a.read(self.local, [i], self.remote, [i]) for i in range(4)]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            waits = [pool.submit(wait, move) for move in others]
            begun.wait()
            self.a.close()
        for one in waits:
            one.result()


class Ends(unittest.TestCase):
    def test_an_agent_is_destroyed_when_no_call_is_under_way(self):
        order, inside, leave = [], threading.Event(), threading.Event()

        def call(_agent):
            inside.set()
            leave.wait()
            order.append("left")

        library = mock.Mock()
        library.agent_destroy = lambda _agent: order.append("destroyed")
        with mock.patch.object(_handle, "lib", library):
            handle = _handle.Handle(1)
            threads = [threading.Thread(target=handle.ask, args=(call,)), threading.Thread(target=handle.destroy)]
            threads[0].start()
            inside.wait()
            threads[1].start()
            while handle.value is not None:
                os.sched_yield()
            with self.assertRaises(baton.InvalidParamError):
                handle.ask(call)
            handle.drop(call)  # quiet
            leave.set()
            for thread in threads:
                thread.join()
            handle.destroy()  # once is enough
        self.assertEqual(order, ["left", "destroyed"])

    def test_daemon_threads_use_an_agent_while_the_interpreter_ends(self):
        for provider in ("shm", "tcp"):
            for what, times in (("transfers", 1), ("metadata", 4), ("messages", 2), ("lists", 1)):
                for _ in range(times):
                    with self.subTest(provider=provider, what=what):
                        ended = subprocess.run([sys.executable, "-c", AT_THE_END, provider, what], check=False,
                                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                        self.assertEqual((ended.returncode, ended.stderr), (0, b""))


if __name__ == "__main__":
    unittest.main()
