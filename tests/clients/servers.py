"""Servers to be clients of: one process, or a router before a prefill and a decode worker."""

import contextlib
import signal
import subprocess
import time
import urllib.request

MODEL = "models/kjv-1.8m"
NAME = "kjv-1.8m"


class Server:
    """A `baton serve` process on a port of its own choice."""

    def __init__(self, baton, log, *flags):
        self.command = [baton, "serve", "--port", "0", *flags]
        self.log = log
        self.start()

    def start(self):
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        line = self.process.stdout.readline()
        while line and " on http" not in line:  # it may say more of itself first
            line = self.process.stdout.readline()
        if not line:
            self.stop()
            raise RuntimeError(f"{' '.join(self.command)} did not start")
        self.url = line.split(" on ")[1].strip()

    def stop(self):
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def wait_until_up(url, seconds=60):
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url + "/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise RuntimeError(f"{url} is not up after {seconds} s")
        time.sleep(0.1)


@contextlib.contextmanager
def one_server(baton, log, *flags):
    server = Server(baton, log, "--role", "all", "--model", MODEL, *flags)
    try:
        yield server.url
    finally:
        server.stop()


@contextlib.contextmanager
def router_with_workers(baton, log, *flags):
    started = []
    try:
        for role in ("prefill", "decode"):
            started.append(Server(baton, log, "--role", role, "--model", MODEL, *flags))
        prefill, decode = (worker.url for worker in started)
        started.append(Server(baton, log, "--role", "router", "--prefill", prefill, "--decode", decode))
        wait_until_up(started[-1].url)
        yield started[-1].url
    finally:
        for server in reversed(started):
            server.stop()
