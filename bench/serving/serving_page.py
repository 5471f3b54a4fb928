"""One trace, several servers: Baton in one process, Baton's prefill and decode behind its router, and, where ./run vllm has
installed it, vLLM in one process and vLLM's prefill and decode over NIXL. `baton serve_bench` asks them in turns; what they
answered becomes a picture and a table.

usage: serving_page.py BATON [--model FOLDER] [--requests N] [--rounds N] [--rate R] [--seed N] [--out FOLDER]

Written to FOLDER (default build/serving): trace.jsonl, report.json, serving.png (with matplotlib), and each server's log.
All servers have bf16 weights, bf16 arithmetic and a thread for each processor; what one of them leaves idle the others have.
"""
import argparse
import contextlib
import json
import os
import pathlib
import random
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/clients"), str(ROOT / "tests/python/vllm")]
PORT = 18500
THREADS = len(os.sched_getaffinity(0))


def make_trace(path, requests, rate, seed):
    """In Mooncake's format: 60 of 100 prompts begin with one of six documents of a half to 1.5 blocks of 512 tokens; Poisson
    arrivals."""
    dice, at = random.Random(seed), 0.0
    documents = [([100 + i], dice.choice((384, 512))) for i in range(6)]
    with open(path, "w") as trace:
        for i in range(requests):
            at += dice.expovariate(rate)
            hashes, length = dice.choice(documents) if dice.random() < 0.6 else ([], 0)
            length += dice.randint(40, 200)
            trace.write(json.dumps({"timestamp": round(1000 * at), "input_length": length,
                                    "output_length": dice.randint(8, 64),
                                    "hash_ids": hashes + [1000 + i]}) + "\n")


def baton_servers(stack, baton, model, logs):
    """[(name, url)]"""
    import servers as clients
    flags = ("--threads", str(THREADS), "--arithmetic", "bf16", "--served-model-name", "m")

    def serve(name, *more):
        log = stack.enter_context(open(logs / f"{name}.log", "w"))
        server = clients.Server(baton, log, *more)
        stack.callback(server.stop)
        return server.url

    one = serve("baton", "--role", "all", "--model", model, *flags)
    prefill, decode = (serve(f"baton-{role}", "--role", role, "--model", model, *flags) for role in ("prefill", "decode"))
    router = serve("baton-router", "--role", "router", "--prefill", prefill, "--decode", decode)
    clients.wait_until_up(router)
    return [("Baton P/D", router), ("Baton", one)]


def vllm_servers(stack, model, logs):
    for name in ("servers", "proxy", "pairs"):
        sys.modules.pop(name, None)
    sys.path.insert(0, str(ROOT / "tests/python/vllm"))
    import pairs
    import servers
    os.environ["OMP_NUM_THREADS"] = str(THREADS)
    servers.CALM["OMP_NUM_THREADS"] = str(THREADS)
    servers.Server.DTYPE = "bfloat16"
    arguments = argparse.Namespace(model=model, logs=logs)
    one = servers.Server("vllm", model, PORT, logs).start()
    stack.callback(one.close)
    pair = stack.enter_context(pairs.Pair("nixl", "nixl", PORT + 20, arguments))
    one.ready()
    return [("vLLM", one.url), ("vLLM P/D, NIXL", pair.proxy.url)]


def draw(report, path):
    """Distributions of the time to the first token and of the time between tokens: the more to the left, the better."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for one in [report, *report.get("baselines", [])]:
        gaps = [1e3 * gap for gaps in one["itls"] for gap in gaps]
        firsts = [1e3 * first for first, error in zip(one["ttfts"], one["errors"]) if not error]
        for axis, values in zip(axes, (firsts, gaps)):
            values = sorted(values)
            axis.plot(values, [(i + 1) / len(values) for i in range(len(values))], label=one["name"],
                      linestyle="-" if one["name"].startswith("Baton") else "--")
    for axis, title in zip(axes, ("time to the first token", "time between two tokens")):
        axis.set(xscale="log", xlabel=f"{title}, ms", ylabel="part of all", ylim=(0, 1.01))
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baton")
    parser.add_argument("--model", default=str(ROOT / "models/kjv-1.8m"))
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build/serving")
    arguments = parser.parse_args()
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    make_trace(out / "trace.jsonl", arguments.requests, arguments.rate, arguments.seed)
    with contextlib.ExitStack() as stack:
        asked = baton_servers(stack, arguments.baton, arguments.model, out)
        try:
            import vllm  # noqa: F401
            asked += vllm_servers(stack, arguments.model, out)
        except ImportError:
            print("without vLLM: ./run vllm installs it")
        (name, url), *others = asked
        command = [arguments.baton, "serve_bench", "--url", url, "--name", name, "--model", "m", "--dataset-name", "mooncake",
                   "--dataset-path", str(out / "trace.jsonl"), "--num-prompts", str(arguments.requests),
                   "--rounds", str(arguments.rounds), "--num-warmups", "8", "--metric-percentiles", "90,99",
                   "--temperature", "0", "--json", str(out / "report.json"), "--save-detailed"]
        for name, other in others:
            command += ["--baseline", f"{name}={other}"]
        status = subprocess.run(command).returncode
    report = json.loads((out / "report.json").read_text())
    try:
        draw(report, out / "serving.png")
        print(f"{out / 'serving.png'}")
    except ImportError:
        print("without a picture: pip install matplotlib")
    return status


if __name__ == "__main__":
    sys.exit(main())
