"""Where a router sends prompts, and what that is worth: the same trace by each `--pick`, over servers with small caches.

usage: routing.py BATON [--requests N] [--rounds N] [--rate R] [--workers N] [--blocks N] [--tenants N] [--documents N]
                  [--shared X] [--model FOLDER] [--seed N] [--json FILE]

Each policy has servers of its own with empty caches (`baton serve`, one thread each) behind a router: `hash` sends a beginning
always to the same server, `guess` goes by what was sent where and by load, `cache` by what servers tell of their caches. Requests come at
R a second, at random, the same ones at the same times for all. A part X of the prompts are a tenant's instruction, one of its
documents, and a question; tenants and documents are asked for as often as Zipf says (exponents 1.2 and 0.5); the others are like
nothing else. Prints which part of all prompt tokens was found in a cache, what one cache without an end would have found, and
the time to the first token (P50, P90, P99), and writes all of it to FILE, which `scripts/make_tables --take routing FILE` takes.
"""
import argparse
import asyncio
import contextlib
import json
import pathlib
import random
import sys
import time
import urllib.parse

from crowd import ROOT, request, servers

POLICIES = ("hash", "guess", "cache")
INSTRUCTION, DOCUMENT, QUESTION = 160, 480, 24  # tokens; a prompt that is like nothing else has as many
BLOCK = 16


def make_trace(arguments):
    """[(seconds, tokens)]"""
    dice, at, trace = random.Random(arguments.seed), 0.0, []

    def tokens(count):
        return [dice.randrange(260, 1000) for _ in range(count)]

    def often(count, exponent):
        return [1 / (i + 1) ** exponent for i in range(count)]
    shared = []
    for _ in range(arguments.tenants):
        instruction = tokens(INSTRUCTION)
        shared.append([instruction + tokens(DOCUMENT) for _ in range(arguments.documents)])
    for _ in range(arguments.requests):
        at += dice.expovariate(arguments.rate)
        if dice.random() < arguments.shared:
            documents = dice.choices(shared, often(arguments.tenants, 1.2))[0]
            prompt = dice.choices(documents, often(arguments.documents, 0.5))[0] + tokens(QUESTION)
        else:
            prompt = tokens(INSTRUCTION + DOCUMENT + QUESTION)
        trace.append((at, prompt))
    return trace


def most_found(trace):
    """The part that is found in one cache that forgets nothing: whole blocks, but for the last token."""
    seen, found = set(), 0
    for _, prompt in trace:
        names = [hash(tuple(prompt[:end])) for end in range(BLOCK, len(prompt), BLOCK)]
        known = [name in seen for name in names] + [False]
        found += BLOCK * known.index(False)
        seen.update(names)
    return found / sum(len(prompt) for _, prompt in trace)


async def ask(at, begin, when, prompt):
    """(seconds to the first token, tokens found in a cache)"""
    await asyncio.sleep(max(0, begin + when - time.monotonic()))
    asked, first, found, done = time.monotonic(), None, None, False
    reader, writer = await asyncio.open_connection(at.hostname, at.port, limit=1 << 22)
    writer.write(request(at, "/v1/completions", {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True,
                                                 "stream": True, "stream_options": {"include_usage": True}}))
    status = (await reader.readline()).split()
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            done = True
        elif line.startswith(b"data: "):
            first = first or time.monotonic() - asked
            usage = json.loads(line[6:]).get("usage")
            found = usage["prompt_tokens_details"]["cached_tokens"] if usage else found
    writer.close()
    if status[1:2] != [b"200"] or not done or found is None:
        raise RuntimeError(f"a request was not answered whole: {b' '.join(status).decode()}")
    return first, found


def run(arguments, policy, trace, log):
    """[(seconds to the first token, tokens found)] of all requests"""
    with contextlib.ExitStack() as stack:
        def serve(*flags):
            server = servers.Server(arguments.baton, log, *flags)
            stack.callback(server.stop)
            return server.url
        workers = [serve("--role", "all", "--model", arguments.model, "--blocks", str(arguments.blocks), "--threads", "1",
                         "--max-waiting", "1000000", "--max-wait", "86400") for _ in range(arguments.workers)]
        router = serve("--role", "router", "--tokenizer", arguments.model, "--pick", policy, "--hedge-after", "0",
                       *(word for worker in workers for word in ("--decode", worker)))
        servers.wait_until_up(router)
        at = urllib.parse.urlsplit(router)

        async def all_of_them():
            begin = time.monotonic()
            return await asyncio.gather(*(ask(at, begin, when, prompt) for when, prompt in trace))
        return asyncio.run(all_of_them())


def quantile(values, q):
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def row_of(policy, answers, trace, rounds):
    firsts = [1000 * first for first, _ in answers]
    found = sum(tokens for _, tokens in answers) / (rounds * sum(len(prompt) for _, prompt in trace))
    return {"pick": policy, "found": found, **{f"ttft_p{q}_ms": quantile(firsts, q / 100) for q in (50, 90, 99)}}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baton")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3, help="the policies take turns")
    parser.add_argument("--rate", type=float, default=8, help="requests a second")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--blocks", type=int, default=160, help="of 16 tokens: the cache of each")
    parser.add_argument("--tenants", type=int, default=2)
    parser.add_argument("--documents", type=int, default=20, help="of each tenant")
    parser.add_argument("--shared", type=float, default=0.6)
    parser.add_argument("--model", default=str(ROOT / "models/kjv-1.8m"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    arguments = parser.parse_args()
    for flag in ("requests", "rounds", "workers", "tenants", "documents"):
        if getattr(arguments, flag) < 1:
            parser.error(f"--{flag} must be at least 1")
    if not 0 <= arguments.shared <= 1 or arguments.rate <= 0:
        parser.error("--shared is between 0 and 1, and --rate above 0")
    if arguments.blocks * BLOCK < 2 * (INSTRUCTION + DOCUMENT + QUESTION):
        parser.error("--blocks has room for two prompts at least")
    return arguments


def main():
    arguments = parse()
    trace = make_trace(arguments)
    most = most_found(trace)
    answers = {policy: [] for policy in POLICIES}
    with open("/dev/null", "w") as log:
        for number in range(arguments.rounds):
            for i in range(len(POLICIES)):
                policy = POLICIES[(i + number) % len(POLICIES)]
                answers[policy] += run(arguments, policy, trace, log)
                print(f"round {number + 1}: {policy}", file=sys.stderr, flush=True)
    rows = [row_of(policy, answers[policy], trace, arguments.rounds) for policy in POLICIES]
    for row in rows:
        row["of_hash"] = row["found"] / max(rows[0]["found"], 1e-9)
        print(f"--pick {row['pick']:6} found {row['found']:.3f} of all prompt tokens, {row['of_hash']:.2f} times hash;   first token "
              f"P50 {row['ttft_p50_ms']:.0f}, P90 {row['ttft_p90_ms']:.0f}, P99 {row['ttft_p99_ms']:.0f} ms")
    print(f"one cache without an end: {most:.3f}")
    if arguments.json is not None:
        settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "baton")}
        arguments.json.write_text(json.dumps({"settings": settings, "most": most, "rows": rows}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
