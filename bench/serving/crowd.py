"""A crowd: thousands of open streams, as many requests of which half was sent, and how soon /health is answered beside them.

usage: crowd.py BATON [--streams N] [--half N] [--probes N] [--tokens N] [--most MS]

One `baton serve` with the model of this repository. All streams are opened at once and must end whole; who has sent half a
request keeps the server waiting. Prints what /health took before (N times) and meanwhile, by a process that does nothing else,
when the streams had their first token and their last, and what memory the server took. Exit status 1 if a stream is not whole, or /health took more than MS (P99).
"""
import argparse
import asyncio
import json
import multiprocessing
import pathlib
import resource
import socket
import sys
import time
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/clients"))
import servers  # noqa: E402


def request(at, path, body=None):
    data = json.dumps(body).encode() if body else b""
    return (f"{'POST' if body else 'GET'} {path} HTTP/1.1\r\nHost: {at.hostname}\r\nConnection: close\r\n"
            f"Content-Length: {len(data)}\r\n\r\n").encode() + data


async def stream(at, tokens, begin):
    """When the first and the last piece came, in seconds; None: it was not whole."""
    try:
        reader, writer = await asyncio.open_connection(at.hostname, at.port, limit=1 << 20)
        writer.write(request(at, "/v1/completions", {"prompt": "In the beginning", "max_tokens": tokens, "stream": True,
                                                     "ignore_eos": True, "stream_options": {"include_usage": True}}))
        first, counted, done = None, 0, False
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                done = True
            elif line.startswith(b"data: "):
                first = first or time.monotonic() - begin
                counted = (json.loads(line[6:]).get("usage") or {}).get("completion_tokens", counted)
        writer.close()
        return (first, time.monotonic() - begin) if done and counted == tokens else None
    except OSError:
        return None


async def half(at):
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    whole = request(at, "/v1/completions", {"prompt": "In the", "max_tokens": 1})
    writer.write(whole[:len(whole) // 2])
    await writer.drain()
    return writer


def probe(at):
    begin = time.monotonic()
    with socket.create_connection((at.hostname, at.port)) as connection:
        connection.sendall(request(at, "/health"))
        with connection.makefile("rb") as answer:
            good = b" 200 " in answer.readline()
    return 1e3 * (time.monotonic() - begin) if good else float("inf")


class Prober:
    """A process of its own: where thousands of clients open and read their streams a probe would wait for all of these."""

    def __init__(self, at):
        fork = multiprocessing.get_context("fork")
        self.enough, (self.ours, theirs) = fork.Event(), fork.Pipe()
        self.process = fork.Process(target=self.run, args=(at, theirs), daemon=True)
        self.process.start()

    def run(self, at, pipe):
        times = []
        while not self.enough.wait(0.02):
            times.append(probe(at))
        pipe.send(times)

    def end(self):
        self.enough.set()
        times = self.ours.recv()
        self.process.join()
        return times


def resident(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def told(name, times):
    times = sorted(times)
    print(f"{name}: median {times[len(times) // 2]:.1f} ms, P99 {times[int(0.99 * (len(times) - 1))]:.1f}, most {times[-1]:.1f}")
    return times[int(0.99 * (len(times) - 1))]


async def crowd(server, arguments):
    at, pid = urllib.parse.urlsplit(server.url), server.process.pid
    told("/health, alone", [probe(at) for _ in range(arguments.probes)])
    prober, before, begin = Prober(at), resident(pid), time.monotonic()
    strangers = [await half(at) for _ in range(arguments.half)]
    streams = [asyncio.ensure_future(stream(at, arguments.tokens, begin)) for _ in range(arguments.streams)]
    await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
    print(f"memory: {before >> 10} MiB before, {resident(pid) >> 10} MiB meanwhile: "
          f"{(resident(pid) - before) / (arguments.streams + arguments.half):.1f} KiB a connection")
    await asyncio.wait(streams)
    times = prober.end()
    slowest = told(f"/health, beside {arguments.streams} streams and {arguments.half} halves ({len(times)} times)", times)
    for writer in strangers:
        writer.close()
    ends = [each.result() for each in streams]
    whole = [each for each in ends if each]
    if not whole:
        print(f"none of {len(ends)} streams was whole")
        return 1
    print(f"{len(whole)} of {len(ends)} streams whole; the last first token after {max(first for first, _ in whole):.1f} s, "
          f"the last token after {max(last for _, last in whole):.1f} s")
    return 0 if len(whole) == len(ends) and (arguments.most is None or slowest <= arguments.most) else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baton")
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--half", type=int, default=2000)
    parser.add_argument("--probes", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--most", type=float)
    parser.add_argument("flags", nargs="*", help="for `baton serve`, behind --")
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the server's too
    server = servers.Server(arguments.baton, None, "--role", "all", "--model", str(ROOT / "models/kjv-1.8m"), *arguments.flags)
    try:
        return asyncio.run(crowd(server, arguments))
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main())
