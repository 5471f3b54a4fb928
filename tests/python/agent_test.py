"""The Python package: buffers, agents in one process and in two, asyncio, and what goes wrong."""
import asyncio
import concurrent.futures
import contextlib
import gc
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest

import baton
from baton.buffers import host_memory_of, rows_of
from helpers import in_threads

try:
    import numpy
except ImportError:
    numpy = None


def pages(memory, size, count):
    """Rows of `count` pages of `size` bytes, one behind the other."""
    return [(baton.memory_of(memory).address, size, 0, size, count)]


class Pair(unittest.TestCase):
    """Two agents, alpha and beta, with 64 KiB each; alpha knows beta."""

    def setUp(self):
        self.mine, self.theirs = bytearray(range(256)) * 256, bytearray(65536)
        self.a, self.b = baton.Agent("alpha"), baton.Agent("beta")
        self.a.register(self.mine)
        self.b.register(self.theirs)
        self.assertEqual(self.a.add_remote(self.b.metadata()), "beta")
        self.local = self.a.prepare(pages(self.mine, 256, 256))
        self.remote = self.a.prepare(pages(self.theirs, 256, 256), "beta")

    def tearDown(self):
        self.a.close()
        self.b.close()

    def heard(self, count=1):
        got = []
        while len(got) < count:
            got += self.b.messages()
        return got


class Agents(Pair):
    def test_pages_go_where_they_should(self):
        self.mine[512:768] = b"x" * 256
        with self.a.write(self.local, [2, 0], self.remote, [100, 7], b"two pages") as write:
            write.wait(60)
            self.assertTrue(write.done())
            self.assertTrue(write.local_free())
            seen = write.telemetry()
            self.assertEqual((seen.bytes, seen.descriptors), (512, 2))
        self.assertEqual(self.theirs[25600:25856], b"x" * 256)
        self.assertEqual(self.theirs[7 * 256:8 * 256], bytes(range(256)))
        self.assertEqual(self.theirs.count(0), 65536 - 256 - 255)
        self.assertEqual(self.heard(), [("alpha", b"two pages")])
        self.theirs[0:256] = b"y" * 256
        self.a.read(self.local, (5,), self.remote, range(1)).wait(60)
        self.assertEqual(self.mine[5 * 256:6 * 256], b"y" * 256)

    def test_what_goes_wrong_is_an_exception_that_says_so(self):
        transfer = self.a.transfer(baton.WRITE, self.local, [0], self.remote, [0])
        for kind, call in (
                (baton.NotPostedError, transfer.done),
                (baton.InvalidParamError, lambda: self.a.write(self.local, [256], self.remote, [0])),
                (baton.InvalidParamError, lambda: self.a.write(self.local, [-1], self.remote, [0])),
                (baton.InvalidParamError, lambda: self.a.write(self.local, [0, 1], self.remote, [0])),
                (baton.InvalidParamError, lambda: baton.Agent("")),
                (baton.NotFoundError, lambda: self.a.prepare([(4096, 1, 0)])),
                (baton.NotFoundError, lambda: self.a.notify("nobody", b"x")),
                (baton.NotFoundError, lambda: self.a.deregister(bytearray(10))),
                (baton.MismatchError, lambda: self.a.add_remote(b"nixl" * 30)),
                (baton.InvalidParamError, lambda: self.a.add_remote(self.a.metadata())),
                (ValueError, lambda: self.a.register(b"read-only"))):
            with self.assertRaises(kind) as raised:
                call()
            self.assertGreater(len(str(raised.exception)), 20)
        transfer.release()
        transfer.release()
        with self.assertRaises(baton.NotFoundError):
            transfer.post()

    def test_lost_messages_are_told(self):
        with baton.Agent("still", progress_thread=False) as still:  # confirms nothing
            self.a.add_remote(still.metadata())
            self.a.notify("still", b"first")
            self.a.notify("still", b"")
            self.assertEqual(self.a.lost_messages(), [])
            self.a.remove_remote("still")
            lost = self.a.lost_messages()
            self.assertEqual([(agent, message) for agent, message, _ in lost], [("still", b"first"), ("still", b"")])
            self.assertTrue(all(why for _, _, why in lost))
            self.assertEqual(self.a.lost_messages(), [])
            self.assertEqual(self.a.stats()["messages_lost"], 2)

    def test_a_closed_agent_is_an_error_and_no_crash(self):
        transfer = self.a.transfer(baton.WRITE, self.local, [0], self.remote, [0])
        self.a.close()
        for call in (transfer.post, transfer.done, self.a.metadata, self.a.messages,
                     lambda: self.a.prepare([(1, 1, 0)])):
            with self.assertRaises(baton.InvalidParamError):
                call()
        self.a.close()
        transfer.release()

    def test_what_nobody_has_any_more_is_given_back(self):
        for _ in range(10):
            self.a.transfer(baton.WRITE, self.local, [0], self.remote, [0]).post()
            self.a.prepare(pages(self.mine, 16, 4))
        gc.collect()
        self.assertEqual((self.a.stats()["transfers"], self.a.stats()["lists"]), (0, 2))

    def test_registered_memory_stays_alive(self):
        memory = bytearray(b"z" * 4096)
        row = tuple(baton.memory_of(memory)[:3])
        self.a.register(memory)
        del memory
        gc.collect()
        self.a.direct(baton.WRITE, [row], [(*baton.memory_of(self.theirs)[:1], 4096, 0)], "beta").post().wait(60)
        self.assertEqual(self.theirs[:4096], b"z" * 4096)
        self.a.deregister(row)

    def test_threads(self):
        def work(base):
            for number in range(base, base + 50):
                with self.a.write(self.local, [number], self.remote, [number], b"%d" % number) as write:
                    write.wait(60)

        in_threads(work, range(0, 200, 50))
        self.assertEqual(sorted(int(message) for _, message in self.heard(200)), list(range(200)))
        self.assertEqual(self.theirs[:200 * 256], self.mine[:200 * 256])

    def test_tasks_of_transfers(self):
        """What takes coroutines takes a transfer: each task that waits for it ends as it does."""
        async def move():
            first, second, third = (self.a.transfer(baton.WRITE, self.local, [i], self.remote, [i], b"m") for i in range(3))
            tasks = [asyncio.create_task(one) for one in (first, second, first)]
            await asyncio.wait_for(asyncio.gather(*tasks, asyncio.ensure_future(third)), 60)
            self.assertTrue(first.done() and second.done() and third.done())
            await asyncio.wait_for(first, 60)
            gone = asyncio.create_task(self.a.transfer(baton.WRITE, self.local, [9], self.remote, [9]))
            gone.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await gone
            self.assertEqual(self.theirs[:768], self.mine[:768])
            self.assertEqual(self.theirs[768:], bytes(65536 - 768), "the cancelled one did not start")
            heard = await asyncio.wait_for(asyncio.to_thread(self.b.wait_messages), 60)
            self.assertEqual(heard[0], ("alpha", b"m"))
            self.b.close()
            with self.assertRaises(baton.RemoteDisconnectError):
                await asyncio.create_task(self.a.transfer(baton.WRITE, self.local, [0], self.remote, [0]))
            await asyncio.create_task(second)
            with baton.Agent("c", require="tcp") as c, baton.Agent("still", require="tcp", progress_thread=False) as still:
                c.register(self.mine)
                still.register(self.theirs)
                c.add_remote(still.metadata())
                slow = c.direct(baton.WRITE, [self.mine], [self.theirs], "still")
                tasks = [asyncio.create_task(slow) for _ in range(3)]
                await asyncio.sleep(0.01)
                self.assertFalse(any(one.done() for one in tasks), "nobody answers")
                while not all(one.done() for one in tasks):
                    still.progress()
                    await asyncio.sleep(0)
                await asyncio.gather(*tasks)
            return "over"

        self.assertEqual(asyncio.run(move(), debug=True), "over")
        self.assertEqual(self.theirs, self.mine)
        with contextlib.closing(self.a.transfer(baton.WRITE, self.local, [0], self.remote, [0])) as closed:
            pass
        with self.assertRaises(baton.NotFoundError):
            closed.post()

    def test_waiting_for_messages_and_for_another_agent(self):
        for timeout in (0, 0.01):
            with self.assertRaises(baton.BatonTimeoutError):
                self.b.wait_messages(timeout)
        for message in (b"first", b"second"):
            self.a.notify("beta", message)
        got = self.b.wait_messages()
        while len(got) < 2:
            got += self.b.wait_messages(60)
        self.assertEqual(got, [("alpha", b"first"), ("alpha", b"second")])
        self.a.wait_remote("beta", [self.theirs], 60)
        with self.assertRaisesRegex(baton.BatonTimeoutError, "did not appear in time: its metadata was not loaded here"):
            self.a.wait_remote("gamma", timeout=0)
        with self.assertRaisesRegex(baton.BatonTimeoutError, "lacks this memory"):
            self.a.wait_remote("beta", [(1, 1, 0)], 0)
        with socket.socket() as closed:  # nobody listens there, nor will
            closed.bind(("127.0.0.1", 0))
            where = f"127.0.0.1:{closed.getsockname()[1]}"
            self.a.fetch_metadata("gamma", where)
            with self.assertRaisesRegex(baton.BatonTimeoutError, where):
                self.a.wait_remote("gamma", timeout=0.3)
        with baton.Agent("gamma", serve_metadata=True) as gamma:
            waiting = threading.Thread(target=self.a.wait_remote, args=("gamma",))
            waiting.start()
            self.a.fetch_metadata("gamma", f"127.0.0.1:{gamma.port}")
            waiting.join()
            self.assertTrue(self.a.has_remote("gamma"))
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(self.a.wait_messages)
            self.a.close()  # ends a wait without an end
        with self.assertRaisesRegex(baton.InvalidParamError, "closed"):
            waiting.result()

    def test_memory_that_is_registered_cannot_be_closed(self):
        ours, theirs = self.a.allocate(4096), mmap.mmap(-1, 4096)
        self.a.register(theirs)
        for memory in (ours, theirs):
            with self.assertRaises(BufferError):
                memory.close()
            memory[:3] = b"abc"
        self.a.deregister(ours)
        self.a.deregister(theirs)
        for memory in (ours, theirs):
            memory.close()
        last = self.a.allocate(4096)
        self.a.close()
        self.assertEqual(last[:3], bytes(3))
        last.close()
        with self.assertRaises(baton.InvalidParamError):
            self.b.allocate(0)

    def test_await_in_the_loops_of_several_threads(self):
        """An event wakes one of the loops, which tells the others."""
        async def move(mine):
            for turn in range(200):
                transfer = self.a.transfer(baton.WRITE, self.local, range(mine, 256, 4), self.remote,
                                           range(mine, 256, 4), b"m")
                await asyncio.wait_for(transfer.post(), 60)
                transfer.release()

        in_threads(lambda mine: asyncio.run(move(mine)), range(4))
        self.assertEqual(self.theirs, self.mine)

    def test_metadata_by_listener(self):
        with baton.Agent("server", serve_metadata=True) as server:
            memory = bytearray(64)
            server.register(memory)
            where = f"127.0.0.1:{server.port}"
            self.a.fetch_metadata("server", where)
            while not self.a.has_remote("server", [memory]):
                pass
            self.a.send_metadata(where)
            while not server.has_remote("alpha"):
                pass
            self.a.invalidate_metadata(where)
            while server.has_remote("alpha"):
                pass

    def test_settings_and_providers(self):
        with baton.Agent("tcp", providers=["tcp"], require="tcp", settings={"tcp.sockets": 2}) as tcp:
            tcp.add_remote(self.b.metadata())
            tcp.notify("beta", b"by tcp")
            self.assertEqual(self.heard(), [("tcp", b"by tcp")])
            self.assertIn("tcp", tcp.explain("beta"))
        with self.assertRaisesRegex(baton.InvalidParamError, "tcp.sockets"):
            baton.Agent("wrong", settings={"tcp.sokets": 2})


class Ends(unittest.TestCase):
    """What is collected in no order, by the interpreter's end or in a circle; and a fork. In a process of their own."""

    BEGIN = """if True:
        import gc, os, sys
        import baton
        a, b = baton.Agent("a"), baton.Agent("b")
        mine, theirs = bytearray(b"x" * 64), bytearray(64)
        a.register(mine), b.register(theirs)
        a.add_remote(b.metadata())
        rows = [(baton.memory_of(memory).address, 64, 0) for memory in (mine, theirs)]
        listed = a.prepare(rows[:1])
        move = a.direct(baton.WRITE, rows[:1], rows[1:], "b").post()
        move.wait(60)
    """

    def ran(self, program):
        ran = subprocess.run([sys.executable, "-c", self.BEGIN + program], capture_output=True, text=True, timeout=250,
                             check=False)
        self.assertEqual((ran.returncode, ran.stderr), (0, ""))
        return ran.stdout

    # Promise(python): A transfer may outlive its agent; a forked child's end touches nothing of its
    #   parent's | open handles are known in one place; forks are counted
    def test_the_interpreter_ends_before_a_transfer_is_released(self):
        self.ran("")

    def test_a_circle_of_agent_list_and_transfer(self):
        self.ran("""
        class Engine: pass
        engine = Engine()
        engine.agent, engine.move, engine.listed, engine.self = a, move, listed, engine
        del a, move, listed, engine
        gc.collect()
        assert b.stats()["running"] == 0
        """)

    def test_a_forked_child_has_no_agent_and_may_make_one(self):
        self.assertEqual(self.ran("""
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's, of forks beside threads
        child = os.fork()
        if child == 0:
            for call in (move.post, a.metadata, lambda: a.prepare(rows[:1])):
                try:
                    call()
                    os._exit(3)
                except baton.InvalidParamError as why:
                    assert "forked" in str(why), why
            c = baton.Agent("c")
            c.register(mine)
            sys.exit(0 if c.port else 4)  # with all that runs at an end
        assert os.waitpid(child, 0)[1] == 0
        mine[:] = b"y" * 64
        move.post().wait(60)
        print(theirs[:2].decode())
        """), "yy\n")


class TwoProcesses(unittest.TestCase):
    def start(self, name, *words):
        child = subprocess.Popen([sys.executable, os.path.join(os.path.dirname(__file__), "peer.py"), name, *words],
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.addCleanup(self.finish, child)
        return child

    @staticmethod
    def finish(child):
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
    def test_a_silent_peer_ends_no_wait_and_holds_no_lock(self):
        with baton.Agent("decode", providers=["tcp"], require="tcp") as decode:
            memory = bytearray(1 << 20)
            decode.register(memory)
            child = self.start("prefill")
            decode.add_remote(bytes.fromhex(child.stdout.readline().decode()))
            address = int(child.stdout.readline())
            local = decode.prepare(pages(memory, 4096, 256))
            remote = decode.prepare([(address, 4096, 0, 4096, 256)], "prefill")
            decode.read(local, [1], remote, [1]).wait(60)
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            ticks = []
            ticker = threading.Thread(target=lambda: [(ticks.append(time.sleep(0.001))) for _ in range(50)])
            ticker.start()
            read = decode.read(local, [2], remote, [2])
            while len(ticks) < 50:  # one wait holds the lock of the interpreter for no tick
                with self.assertRaises(baton.BatonTimeoutError):
                    read.wait(0.1)
            ticker.join()
            with self.assertRaises(baton.RepostActiveError):
                read.post()
            memory[8192:12288] = b"?" * 4096
            child.send_signal(signal.SIGCONT)
            read.release()
            self.assertIn(memory[8192:12288], (b"?" * 4096, b"\x02" * 4096))


@unittest.skipIf(numpy is None, "numpy is not installed (Debian: python3-numpy)")
class Arrays(Pair):
    def test_arrays_of_descriptors_and_of_indices(self):
        source = numpy.arange(4096, dtype=numpy.uint32)
        target = numpy.zeros((64, 64), dtype=numpy.uint32)
        self.a.register(source)
        self.b.register(target)
        self.a.add_remote(self.b.metadata())
        rows = numpy.array([[source.ctypes.data + 256 * i, 256, 0] for i in range(64)], dtype=numpy.uint64)
        local = self.a.prepare(rows)
        remote = self.a.prepare(numpy.array([[target.ctypes.data, 256, 0, 256, 64]], dtype=numpy.int64), "beta")
        for kind in (numpy.int64, numpy.int32, numpy.uint64, numpy.float64):
            target[:] = 0
            order = numpy.arange(64, dtype=kind)
            self.a.write(local, order, remote, order[::-1]).wait(60)
            self.assertTrue((target[::-1] == source.reshape(64, 64)).all())
        with self.assertRaises(ValueError):
            self.a.write(local, numpy.zeros((2, 2), dtype=numpy.int64), remote, [0, 1, 2, 3])

    def test_memory_of_what_there_is(self):
        array = numpy.zeros((4, 8), dtype=numpy.float32)
        self.assertEqual(baton.memory_of(array)[:3], (array.ctypes.data, 128, 0))

        class Speaks:  # DLPack, and nothing else
            def __dlpack__(self, **_):
                return array.__dlpack__()

            def __dlpack_device__(self):
                return (1, 0)

        self.assertEqual(baton.memory_of(Speaks())[:2], (array.ctypes.data, 128))
        Speaks.__dlpack_device__ = lambda self: (2, 3)  # CUDA's, were it true
        self.assertEqual(baton.memory_of(Speaks())[:3], (array.ctypes.data, 128, 3))
        self.assertEqual(baton.memory_of(Speaks()).kind, baton.VRAM)
        with self.assertRaises(NotImplementedError):
            host_memory_of(Speaks())
        Speaks.__dlpack_device__ = lambda self: (7, 0)
        with self.assertRaises(NotImplementedError):
            baton.memory_of(Speaks())

        class Array:  # CUDA's array interface, and nothing else
            def __init__(self, strides=None, device=None):
                self.__cuda_array_interface__ = {"shape": (4, 8), "typestr": "<f4", "data": (4096, False),
                                                 "strides": strides, "version": 3}
                if device is not None:
                    self.device = device

        self.assertEqual(baton.memory_of(Array())[:3], (4096, 128, 0))
        self.assertEqual(baton.memory_of(Array((32, 4), 1))[:3], (4096, 128, 1))
        self.assertEqual(baton.memory_of(Array(device=type("Device", (), {"id": 2})()))[:3], (4096, 128, 2))
        for strides in ((64, 4), (32, 8), (33, 4)):
            with self.assertRaises(ValueError):
                baton.memory_of(Array(strides))

    def test_what_is_listed_together_is_of_one_kind(self):
        host, device = baton.Memory(4096, 64, 0, None), baton.Memory(8192, 64, 1, None, baton.VRAM)
        self.assertEqual(rows_of([host]).kind, baton.DRAM)
        self.assertEqual(rows_of([device, (1, 2, 3)]).kind, baton.VRAM)
        self.assertEqual(rows_of([(1, 2, 3)]).kind, baton.DRAM)
        self.assertEqual(rows_of([(1, 2, 3)], baton.VRAM).kind, baton.VRAM)
        for mixed, kind in (([host, device], None), ([device], baton.DRAM), ([host], baton.VRAM), ([host], 77)):
            with self.assertRaisesRegex(ValueError, "of one kind"):
                rows_of(mixed, kind)


if __name__ == "__main__":
    unittest.main()
