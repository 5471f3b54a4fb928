"""Loading KV from a tier beside computing it, for prompts of each length.

usage: tiers.py BATON [--tiers disk,peer] [--lengths N,...] [--prompts N] [--rounds N] [--threads N]
                [--model FOLDER|tiny] [--folder DIR] [--json FILE]

For each tier (`disk`: a file in DIR, where the NVMe is; `peer`: a `baton kv_store`; `host`: host memory) two servers of one
model, one with the tier and one without. Their caches have room for one prompt, so every prompt that is asked again is found in
the tier alone. Both are asked the same, in turns, one request at a time: first every prompt once, so that it is kept; then once
more, a round that is not counted; then N rounds. Each round has N prompts of each length, in an order of its own, and each
prompt is one that was not asked again before. Prints the medians of the time to the first token, and writes them to FILE, for
`scripts/make_tables --take tiers FILE`.

The model is one with random weights (hidden 576, 8 layers, 29 million parameters, contexts of 8,192), made on the first run in
build/serving/tiers; or the one in FOLDER; or `tiny`, one with 150,000 parameters, of which short prompts are computed sooner than
any tier answers. Times of a millisecond are to be had on a quiet machine alone, or at a priority above all else: chrt -r 5 python3 ...
"""
import argparse
import contextlib
import http.client
import json
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

from crowd import ROOT, servers

HOW = ("loaded", "computed")
BLOCK = 16
CACHED = "baton_prefix_cached_tokens_total"


class Store:
    """A `baton kv_store`."""

    def __init__(self, baton, mib):
        self.process = subprocess.Popen([baton, "kv_store", "--memory-mib", str(mib), "--port", "0"], stdout=subprocess.PIPE,
                                        text=True)
        line = self.process.stdout.readline()
        if not line.startswith("ready: "):
            raise RuntimeError("baton kv_store did not start")
        self.address = line.split(" on ")[1].split(",")[0]

    def stop(self):
        self.process.terminate()
        self.process.wait()


class Engine:
    """A server that is asked one request after the other."""

    def __init__(self, baton, how, flags, log):
        self.how = how
        self.server = servers.Server(baton, log, "--role", "all", *flags)
        at = urllib.parse.urlsplit(self.server.url)
        self.connection = http.client.HTTPConnection(at.hostname, at.port, timeout=600)

    def ask(self, prompt):
        """Seconds to the first token."""
        body = json.dumps({"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True})
        begin = time.monotonic()
        self.connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = self.connection.getresponse()
        text = answer.read()
        took = time.monotonic() - begin
        if answer.status != 200:
            raise RuntimeError(f"{self.how}: {answer.status} {text.decode()[:300]}")
        return took

    def metrics(self):
        """{name: value} of cache and tiers, all of one moment."""
        with urllib.request.urlopen(self.server.url + "/metrics", timeout=60) as page:
            lines = [line.split() for line in page.read().decode().splitlines() if line.startswith(("baton_kv_tier_", CACHED))]
        return {name: float(value) for name, value in lines}

    def ready(self, dice):
        """Waits until the tier takes what it is given: a store that has not answered yet has no part in a save."""
        if self.how == "computed":
            return
        end = time.monotonic() + 60
        while not self.metrics()["baton_kv_tier_blocks_saved_total"]:
            if time.monotonic() > end:
                raise RuntimeError("the tier took nothing in 60 s")
            self.ask(prompt_of(dice, BLOCK))
            time.sleep(0.05)

    def keep(self, prompt):
        """Asks for the first time, and waits until all of it is kept."""
        def settled(now):
            return now["baton_kv_tier_blocks_saved_total"] + now["baton_kv_tier_blocks_dropped_total"]
        want = settled(self.metrics()) + (len(prompt) - 1) // BLOCK
        self.ask(prompt)
        end = time.monotonic() + 60
        while self.how == "loaded" and settled(self.metrics()) < want:
            if time.monotonic() > end:
                raise RuntimeError(f"the tier did not take a prompt of {len(prompt)} tokens in 60 s")
            time.sleep(0.001)

    def again(self, prompt):
        """(seconds to the first token, of how many tokens the KV was loaded); nothing where the cache still had some of it"""
        before = self.metrics()
        took = self.ask(prompt)
        after = self.metrics()
        if after[CACHED] > before[CACHED]:
            return None
        return took, int(after["baton_kv_tier_tokens_total"] - before["baton_kv_tier_tokens_total"])

    def stop(self):
        self.connection.close()
        self.server.stop()


def checkpoint(model):
    """FOLDER of --model; made, if need be."""
    if model not in (None, "tiny"):
        return model
    folder = ROOT / "build/serving/tiers" / ("tiny-llama" if model else "random-llama")
    shape = ["--hidden", "64", "--layers", "2", "--heads", "2", "--kv-heads", "2", "--intermediate", "128"] if model else ["--layers", "8"]
    if not (folder / "config.json").exists():
        subprocess.run([sys.executable, ROOT / "tests/models/random_llama.py", folder, *shape, "--positions", "8192"], check=True)
    return str(folder)


def flags_of(arguments, tier, folder, stack):
    # A prompt of the longest kind, what is being kept of the one before, and no more.
    longest = max(arguments.lengths) // BLOCK + 2
    flags = ["--model", arguments.model, "--threads", str(arguments.threads), "--blocks", str(longest + longest // 8 + 4)]
    if tier is None:
        return flags
    if tier == "disk":
        return flags + ["--kv-disk", str(folder), "--kv-disk-gib", str(arguments.gib)]
    if tier == "host":
        return flags + ["--kv-host-mib", str(int(arguments.gib * 1024))]
    store = Store(arguments.baton, int(arguments.gib * 1024))
    stack.callback(store.stop)
    return flags + ["--kv-store", store.address]


def prompt_of(dice, length):
    """Of whole blocks and a token, which is always computed."""
    return [dice.randrange(260, 1000) for _ in range(length + 1)]


def prompts_of(dice, arguments):
    """A round's, in the order in which they are asked."""
    prompts = [prompt_of(dice, length) for length in arguments.lengths * arguments.prompts]
    dice.shuffle(prompts)
    return prompts


def measure(arguments, tier, folder, log):
    """{how: {length: [(seconds, tokens loaded)]}}"""
    dice = random.Random(arguments.seed)
    rounds = [prompts_of(dice, arguments) for _ in range(arguments.rounds + 1)]
    found = {how: {length: [] for length in arguments.lengths} for how in HOW}
    with contextlib.ExitStack() as stack:
        engines = []
        for how in HOW:
            engines.append(Engine(arguments.baton, how, flags_of(arguments, tier if how == "loaded" else None, folder, stack), log))
            stack.callback(engines[-1].stop)
            engines[-1].ready(dice)
        for prompts in rounds:
            for prompt in prompts:
                for engine in engines:
                    engine.keep(prompt)
        for number, prompts in enumerate(rounds):
            for i, prompt in enumerate(prompts):
                for j in range(len(engines)):
                    engine = engines[(i + j) % len(engines)]
                    seen = engine.again(prompt)
                    if number > 0 and seen is not None:
                        found[engine.how][len(prompt) - 1].append(seen)
            print(f"{tier}: round {number} of {arguments.rounds}", file=sys.stderr, flush=True)
    return found


def rows_of(tier, found):
    rows = []
    for length in found["loaded"]:
        if not all(found[how][length] for how in HOW):
            raise RuntimeError(f"{tier}: prompts of {length} tokens were in the cache all the time: ask more, --prompts or --rounds")
        if any(loaded < length for _, loaded in found["loaded"][length]):
            raise RuntimeError(f"{tier}: not all of a prompt of {length} tokens was found: give it more room, --gib")
        rows.append({"tier": tier, "tokens": length,
                     **{f"{how}_ms": 1000 * statistics.median(took for took, _ in found[how][length]) for how in HOW}})
    return rows


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baton")
    parser.add_argument("--tiers", default="disk,peer")
    parser.add_argument("--lengths", default="16,32,64,128,256,512,1024,2048,4096", help="tokens, in whole blocks of 16")
    parser.add_argument("--prompts", type=int, default=2, help="of each length and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", metavar="FOLDER|tiny")
    parser.add_argument("--folder", type=pathlib.Path, help="for the disk tier (default: build/serving/tiers)")
    parser.add_argument("--gib", type=float, default=1, help="of each server's tier")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    arguments = parser.parse_args()
    arguments.tiers = arguments.tiers.split(",")
    for tier in arguments.tiers:
        if tier not in ("disk", "peer", "host"):
            parser.error(f'--tiers: "{tier}" is not one of disk, peer, host')
    try:
        arguments.lengths = sorted({int(length) for length in arguments.lengths.split(",")})
    except ValueError:
        parser.error("--lengths are numbers with commas between them")
    if any(length < BLOCK or length % BLOCK for length in arguments.lengths):
        parser.error(f"--lengths are multiples of {BLOCK}: blocks are what is kept")
    for flag in ("prompts", "rounds"):
        if getattr(arguments, flag) < 1:
            parser.error(f"--{flag} must be at least 1")
    return arguments


def main():
    arguments = parse()
    home = ROOT / "build/serving/tiers"
    home.mkdir(parents=True, exist_ok=True)
    arguments.model = checkpoint(arguments.model)
    folder = pathlib.Path(tempfile.mkdtemp(dir=arguments.folder or home))
    rows = []
    try:
        with open(home / "log", "w") as log:
            for tier in arguments.tiers:
                rows += rows_of(tier, measure(arguments, tier, folder, log))
    except RuntimeError as error:
        sys.exit(f"tiers: {error}; the servers' log is {home / 'log'}")
    finally:
        shutil.rmtree(folder)
    print(f"{'tier':5} {'tokens':>6} {'loaded':>9} {'computed':>9}")
    for row in rows:
        print(f"{row['tier']:5} {row['tokens']:6} {row['loaded_ms']:6.1f} ms {row['computed_ms']:6.1f} ms")
    if arguments.json is not None:
        settings = {name: str(value) if isinstance(value, pathlib.Path) else value for name, value in vars(arguments).items()
                    if name not in ("json", "baton", "folder")}
        arguments.json.write_text(json.dumps({"settings": settings, "rows": rows}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
