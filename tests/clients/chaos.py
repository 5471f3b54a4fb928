"""A bad day over HTTP: workers die and freeze, clients are slow or leave, and every answer is what it was on a good day.

usage: chaos.py BATON [--events N] [--longest SECONDS] [--calm SECONDS] [--seed N]

A router with two prefill and two decode workers, which keep KV on a small disk (a tmpfs of our own, where the kernel
lets us have one). N times something happens to a worker, drawn by the seed: it is killed (-9; it comes back on its
port), stopped for up to SECONDS (most stops are short), or killed and started while there is no byte free on the disk;
up to --calm seconds later the next one is struck. Meanwhile clients leave, read slowly, or end their sending half.
Every answer that is not left must be whole and equal to that of one undisturbed server; at the end the workers have
nothing left to do.
"""

import argparse
import contextlib
import errno
import http.client
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import servers

PATIENCE = 120  # seconds without a byte of an answer: it hangs
CLIENTS = 6
DISK = "CHAOS_DISK"  # in the environment: the tmpfs that is ours
WORDS = "in the beginning god created heaven and earth it came to pass that king david said unto them behold".split()


def requests_of(seed):
    rng = random.Random(seed)
    shared = " ".join(rng.choices(WORDS, k=60))
    made = []
    for i in range(16):
        text = " ".join(rng.choices(WORDS, k=rng.randrange(4, 60)))
        made.append({"prompt": shared + " " + text if i % 2 else text, "max_tokens": rng.randrange(4, 120),
                     "temperature": rng.choice([0, 0.8]), "seed": i, "ignore_eos": True})
    return made


def post(url, body):
    """A socket on which `body` was posted."""
    at = urllib.parse.urlsplit(url)
    connection = socket.create_connection((at.hostname, at.port), timeout=PATIENCE)
    data = json.dumps(body).encode()
    connection.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                       f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def answer(connection, slowly=0.0, leave_after=None):
    """The text of an answer, streamed or not; None if it was left."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    if response.status != 200:
        raise RuntimeError(f"HTTP {response.status}: {response.read(500)!r}")
    if response.headers["Content-Type"] != "text/event-stream":
        return json.loads(response.read())["choices"][0]["text"]
    text, pieces = "", 0
    for line in response:
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            return text
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(f"in a stream: {event}")
        text += "".join(choice["text"] for choice in event["choices"])
        pieces += 1
        if leave_after is not None and pieces > leave_after:
            return None
        time.sleep(slowly)
    raise RuntimeError("a stream ended without [DONE]")


class Day:
    def __init__(self, options):
        self.options = options
        self.rng = random.Random(options.seed)
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.counts = {}
        self.wrong = []
        self.longest = 0.0
        self.retries = []

    def count(self, what):
        with self.lock:
            self.counts[what] = self.counts.get(what, 0) + 1

    def fail(self, what):
        with self.lock:
            self.wrong.append(what)
        self.over.set()

    def client(self, number, url, wanted):
        rng = random.Random(f"{self.options.seed}-{number}")
        while not self.over.is_set():
            index = rng.randrange(len(wanted))
            body, want = wanted[index]
            kind = rng.choice(["plain"] * 4 + ["stream"] * 4 + ["slow", "leaves", "leaves at once", "half closed"])
            if kind not in ("plain", "half closed"):
                body = {**body, "stream": True}
            began = time.monotonic()
            try:
                with post(url, body) as connection:
                    if kind == "leaves at once":
                        time.sleep(rng.random() * 0.05)
                        got = None
                    else:
                        if kind == "half closed":
                            connection.shutdown(socket.SHUT_WR)
                        got = answer(connection, 0.02 if kind == "slow" else 0,
                                     rng.randrange(20) if kind == "leaves" else None)
            except Exception as error:  # whatever it is: the answer was lost
                self.fail(f"client {number}, request {index}, {kind}: {error!r}")
                return
            if got is not None:
                self.count("answers")
                with self.lock:
                    self.longest = max(self.longest, time.monotonic() - began)
                if got != want:
                    self.fail(f"request {index}, {kind}: {got!r} instead of {want!r}")
                    return
            if kind not in ("plain", "stream"):
                self.count(kind)

    def disturb(self, router, workers):
        """One worker at a time."""
        role, worker = self.rng.choice(workers)
        what = self.rng.choice(["kill -9", "SIGSTOP"] + (["full disk"] if DISK in os.environ else []))
        pause = self.rng.random()
        self.count(what)
        if what == "SIGSTOP":
            worker.process.send_signal(signal.SIGSTOP)
            time.sleep(pause ** 3 * self.options.longest)
            worker.process.send_signal(signal.SIGCONT)
        else:
            with full_disk() if what == "full disk" else contextlib.nullcontext():
                worker.process.kill()
                worker.process.wait()
                time.sleep(pause * min(2, self.options.longest))
                worker.start()
        deadline = time.monotonic() + PATIENCE
        while not all(known["up"] for known in health(router)["workers"]):
            if time.monotonic() > deadline:
                return self.fail(f"the router does not take {role} {worker.url} back")
            time.sleep(0.05)
        # And some time in which nothing happens.
        self.over.wait(pause * self.options.calm)


@contextlib.contextmanager
def full_disk():
    """Not a byte is free."""
    junk = pathlib.Path(os.environ[DISK], "junk")
    with junk.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    try:
        yield
    finally:
        junk.unlink()


def health(url):
    try:
        with urllib.request.urlopen(url + "/health", timeout=PATIENCE) as page:
            return json.load(page)
    except urllib.error.HTTPError as refused:  # no decode worker is up
        return json.load(refused)


def page(url, path):
    with urllib.request.urlopen(url + path, timeout=PATIENCE) as answer:
        return answer.read().decode()


def is_idle(url):
    gauges = re.findall(r"^baton_requests_(?:running|waiting|loading)\S* (\S+)$", page(url, "/metrics"), re.M)
    return bool(gauges) and all(float(value) == 0 for value in gauges)


def run(day, log):
    options = day.options
    with servers.one_server(options.baton, log) as url:
        wanted = [(body, answer(post(url, body))) for body in requests_of(options.seed)]
    workers = []
    try:
        for i, role in enumerate(("prefill", "prefill", "decode", "decode")):
            flags = ["--role", role, "--model", servers.MODEL]
            if DISK in os.environ:
                flags += ["--kv-disk", f"{os.environ[DISK]}/{i}", "--kv-disk-gib", "0.004"]
            worker = servers.Server(options.baton, log, *flags)
            worker.command[worker.command.index("--port") + 1] = worker.url.rsplit(":", 1)[1]
            workers.append((role, worker))
        flags = [word for role, worker in workers for word in (f"--{role}", worker.url)]
        router = servers.Server(options.baton, log, "--role", "router", *flags)
        workers.append(("router", router))
        servers.wait_until_up(router.url)
        threads = [threading.Thread(target=day.client, args=(i, router.url, wanted)) for i in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for _ in range(options.events):
            if not day.over.is_set():
                day.disturb(router.url, workers[:-1])
        day.over.set()
        day.retries = re.findall(r"^baton_router_(retries)_total (\d+)$", page(router.url, "/metrics"), re.M)
        for thread in threads:
            thread.join(2 * PATIENCE)
            if thread.is_alive():
                day.fail("a client still waits for its answer")
        for body, want in wanted:  # and the day after
            if answer(post(router.url, body)) != want:
                day.fail("an answer is another one afterwards")
        deadline = time.monotonic() + PATIENCE
        while not all(is_idle(worker.url) for _, worker in workers[:-1]):
            if time.monotonic() > deadline:
                day.fail("a worker still computes for somebody who has left")
                break
            time.sleep(0.1)
    finally:
        for _, worker in reversed(workers):
            worker.stop()


def counted(day):
    return (", ".join(f"{n:,} {what}" for what, n in sorted(day.counts.items())) + f"; the longest {day.longest:.1f} s; " +
            ", ".join(f"{n} {what}" for what, n in day.retries))


def with_a_disk_of_our_own():
    """Goes on in a mount namespace of its own, where a tmpfs may be mounted; returns where there is none to be had."""
    own = ["unshare", "--user", "--map-root-user", "--mount"]
    try:
        if subprocess.run([*own, "true"], capture_output=True).returncode == 0:
            sys.stdout.flush()
            os.execvpe(own[0], [*own, sys.executable, *sys.argv], {**os.environ, DISK: "/"})
    except FileNotFoundError:
        pass
    print("no disk is filled: this system lets us mount none (unshare --user --mount)")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("baton")
    parser.add_argument("--events", type=int, default=6, help="of workers: clients make more")
    parser.add_argument("--longest", type=float, default=1.0, help="of a SIGSTOP, in seconds")
    parser.add_argument("--calm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    day = Day(parser.parse_args())
    if DISK not in os.environ:
        with_a_disk_of_our_own()
    with tempfile.TemporaryFile("w+") as log, tempfile.TemporaryDirectory() as folder:
        if DISK in os.environ:  # it is gone with this namespace, whatever becomes of us
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", folder], check=True)
            os.environ[DISK] = folder
        try:
            run(day, log)
        except Exception as error:
            day.fail(repr(error))
        if DISK in os.environ:
            subprocess.run(["umount", "--lazy", folder], check=True)
        print(counted(day))
        if day.wrong:
            log.seek(0)
            print(*day.wrong[:5], log.read()[-3000:], f"seed {day.options.seed}", sep="\n")
            sys.exit(1)


main()
