"""Five times as many requests as a server can answer, from clients that give up: how many it answers all the same.

usage: overload.py BATON [--seconds N] [--times X] [--patience S] [--prompt CHARACTERS] [--tokens N] [--stream] [--every N]
                   [--behind-router N]

One `baton serve` with the model of this repository. First what it answers when 16 clients ask one request after the other: its
capacity. Then requests come at X times that rate, at random, for N seconds; who has no whole answer (with --stream: no first
token) after S seconds hangs up. Then half of the capacity. Prints the rates of answers that came in time, what was refused
(429) and what was given up, and where the rest of the capacity went: tokens that were computed for those who had left, and
tokens that were not computed, for want of work or of processors, which the clients of this program need too. --every N
prints the same for every N seconds. --behind-router N: N such servers and a router, which says what it asked twice. Exit status 1 below 0.9 of the capacity, or if a request is lost afterwards.
"""
import argparse
import asyncio
import json
import os
import pathlib
import random
import re
import sys
import time
import urllib.parse
import urllib.request

from crowd import request, servers, ROOT

WORDS = "in the beginning god created heaven and earth it came to pass that king david said unto them behold".split()


class Load:
    def __init__(self, server, arguments, seed):
        self.at, self.arguments, self.dice = urllib.parse.urlsplit(server.url), arguments, random.Random(seed)
        self.ends = {}

    def body(self):
        prompt = ""
        while len(prompt) < self.arguments.prompt:
            prompt += self.dice.choice(WORDS) + " "
        return {"prompt": prompt, "max_tokens": self.arguments.tokens, "ignore_eos": True, "stream": self.arguments.stream}

    async def answer(self, writer_of):
        reader, writer = await asyncio.open_connection(self.at.hostname, self.at.port, limit=1 << 20)
        writer_of.append(writer)
        writer.write(request(self.at, "/v1/completions", self.body()))
        status = int((await reader.readline()).split()[1])
        while status == 200 and (line := await reader.readline()):
            if self.arguments.stream and line.startswith(b"data: "):
                return status, True
        return status, status == 200

    async def one(self, patience):
        """How it ended: answered, refused, given up, lost."""
        writers, end = [], "lost"
        try:
            status, whole = await asyncio.wait_for(self.answer(writers), patience)
            end = "answered" if whole else "refused" if status == 429 else "lost"
        except asyncio.TimeoutError:
            end = "given up"
        except (OSError, ValueError, IndexError):
            pass
        for writer in writers:
            writer.close()
        self.ends[end] = self.ends.get(end, 0) + 1

    async def in_turn(self, clients, seconds):
        until = time.monotonic() + seconds

        async def client():
            while time.monotonic() < until:
                await self.one(600)
        begin = time.monotonic()
        await asyncio.gather(*(client() for _ in range(clients)))
        return self.ends.get("answered", 0) / (time.monotonic() - begin)

    async def at_rate(self, rate, seconds, patience):
        begin, at, open_ones = time.monotonic(), 0.0, []
        while at < seconds:
            await asyncio.sleep(max(0, begin + at - time.monotonic()))
            open_ones.append(asyncio.ensure_future(self.one(patience)))
            at += self.dice.expovariate(rate)
        await asyncio.gather(*open_ones)
        return self.ends.get("answered", 0) / seconds


def metrics(server):
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as page:
        lines = (line.rsplit(" ", 1) for line in page.read().decode().splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in lines}


class Account:
    """The servers' counters so far, and the CPU time spent."""

    def __init__(self, started, load):
        self.at, self.tokens, self.steps, self.server = time.monotonic(), 0.0, 0.0, 0.0
        for server in started:
            lines = metrics(server)
            self.tokens += lines.get("baton_tokens_computed_total", 0)
            self.steps += lines.get("baton_steps_total", 0)
            with open(f"/proc/{server.process.pid}/stat") as stat:
                user, system = stat.read().rsplit(")", 1)[1].split()[11:13]
            self.server += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        self.clients = time.process_time()
        self.ends = dict(load.ends)

    def since(self, before, price=None, rate=None):
        """One line; with what an answer costs and the rate at which tokens were computed when nothing was in the way."""
        seconds = self.at - before.at
        answered = self.ends.get("answered", 0) - before.ends.get("answered", 0)
        tokens = self.tokens - before.tokens
        line = (f"{answered / seconds:.1f} answers/s, {tokens / seconds:.0f} tokens/s in {(self.steps - before.steps) / seconds:.0f} "
                f"steps/s; processors: server {(self.server - before.server) / seconds:.2f}, clients "
                f"{(self.clients - before.clients) / seconds:.2f}")
        if price is not None:
            ends = ", ".join(f"{self.ends[end] - before.ends.get(end, 0)} {end}" for end in sorted(self.ends))
            line += (f"; of the capacity: {answered * price / rate / seconds:.2f} answers in time, "
                     f"{(tokens - answered * price) / rate / seconds:.2f} for others, {1 - tokens / rate / seconds:.2f} not computed; {ends}")
        return line


async def run(started, arguments):
    server = started[-1]
    await Load(server, arguments, 0).in_turn(16, 2)  # the first ones find everything cold
    load = Load(server, arguments, 1)
    begin = Account(started, load)
    capacity = await load.in_turn(16, max(10, arguments.seconds / 6))
    end = Account(started, load)
    print(f"capacity: {end.since(begin)}", flush=True)
    price = (end.tokens - begin.tokens) / load.ends["answered"]
    rate = (end.tokens - begin.tokens) / (end.at - begin.at)
    load = Load(server, arguments, 2)
    begin = last = Account(started, load)
    under_way = asyncio.ensure_future(load.at_rate(arguments.times * capacity, arguments.seconds, arguments.patience))
    while arguments.every and not (await asyncio.wait([under_way], timeout=arguments.every))[0]:
        now = await asyncio.to_thread(Account, started, load)
        print(f"  {now.at - begin.at:.0f} s: {now.since(last, price, rate)}", flush=True)
        last = now
    reached = await under_way
    print(f"{arguments.times:g} times that, for {arguments.seconds} s: {reached:.1f} answers/s in time, {reached / capacity:.2f} of "
          f"the capacity; {Account(started, load).since(begin, price, rate)}", flush=True)
    calm = Load(server, arguments, 3)
    begin = time.monotonic()
    await calm.at_rate(0.5 * capacity, 10, 600)
    if arguments.behind_router:
        print("router:", ", ".join(f"{value:.0f} {name}" for name, value in metrics(server).items()
                                   if re.search("retries|hedges|found_stuck", name)))
    print(f"half of it, afterwards: {json.dumps(calm.ends)} in {time.monotonic() - begin:.1f} s")
    return 0 if reached >= 0.9 * capacity and set(calm.ends) == {"answered"} else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baton")
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--times", type=float, default=5)
    parser.add_argument("--patience", type=float, default=1)
    parser.add_argument("--prompt", type=int, default=2400)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--behind-router", type=int, default=0)
    parser.add_argument("--every", type=float, default=0)
    arguments = parser.parse_args()
    behind = arguments.behind_router
    started = []
    try:
        for _ in range(max(behind, 1)):
            started.append(servers.Server(arguments.baton, None, "--role", "all", "--model", str(ROOT / "models/kjv-1.8m")))
        if behind:
            flags = [word for server in started for word in ("--decode", server.url)]
            started.append(servers.Server(arguments.baton, None, "--role", "router", *flags))
        return asyncio.run(run(started, arguments))
    finally:
        for server in reversed(started):
            server.stop()


if __name__ == "__main__":
    sys.exit(main())
