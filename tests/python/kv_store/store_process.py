"""`baton kv_store` in a process of its own, and somebody between it and its clients who changes what they say."""
import ctypes
import logging
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import unittest

from ports import free_ports

COMMAND = sys.argv.pop(1)  # of a test's command line: the command `baton`
PATIENCE = 60  # s: no test takes so long unless it hangs
_KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Store:
    """Killed, stopped and started again as a test likes; always at the same port, which the kernel gives to nobody while the
    store is not there."""

    def __init__(self, memory_mib=64):
        self.memory_mib, self.port, self.process = memory_mib, free_ports(1), None
        self.start()

    def start(self):
        libc = ctypes.CDLL(None)
        command = [COMMAND, "kv_store", "--memory-mib", str(self.memory_mib), "--provider", "tcp",
                   "--lm-port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True,
                                        preexec_fn=lambda: libc.prctl(_KILL_WITH_PARENT, signal.SIGKILL))
        for line in self.process.stdout:
            if line.startswith("ready"):
                return
        raise AssertionError("baton kv_store did not start")

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def stop(self):
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)  # until it has

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def close(self):
        if self.process.poll() is None:
            self.kill()


class Between:
    """Passes on what clients and the store say to each other, after `change(bytes, to_store)`; None: it is kept back until
    `go_on()`, with all that follows it."""

    def __init__(self, port, change=lambda data, to_store: data):
        self.port, self.change = port, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets, self._threads, self._go_on = [self._listener], [], threading.Event()
        self._start(self._accept)

    def go_on(self):
        self._go_on.set()

    def close(self):
        self._go_on.set()
        end_all(self._sockets)
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()

    def _start(self, what, *arguments):
        self._threads.append(threading.Thread(target=what, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self):
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            self._sockets.append(client)
            try:
                store = socket.create_connection(("127.0.0.1", self.port))
            except OSError:
                client.shutdown(socket.SHUT_RDWR)
                continue
            self._sockets.append(store)
            self._start(self._pass, client, store, True)
            self._start(self._pass, store, client, False)

    def _pass(self, one, other, to_store):
        try:
            while True:
                data = one.recv(1 << 16)
                if not data:
                    break
                changed = self.change(data, to_store)
                if changed is None:
                    self._go_on.wait()
                    changed = data
                other.sendall(changed)
        except OSError:
            pass
        end_all((one, other))


def end_all(sockets):
    """Whoever reads from one of them is told that it has ended."""
    for one in sockets:
        try:
            one.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def descriptors():
    """How many this process has."""
    return len(list(pathlib.Path("/proc/self/fd").iterdir()))


class WithStore(unittest.TestCase):
    """A test that leaves no descriptor and no thread behind."""

    def setUp(self):
        logging.getLogger("baton.kv_store").setLevel(logging.CRITICAL)
        self.before = descriptors(), threading.active_count()

    def tearDown(self):
        self.doCleanups()
        self.assertEqual((descriptors(), threading.active_count()), self.before)

    def store(self, memory_mib=128):
        store = Store(memory_mib)
        self.addCleanup(store.close)
        return store
