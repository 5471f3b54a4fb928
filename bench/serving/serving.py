"""Engines of one checkpoint beside each other on this machine: `vllm bench serve` asks each of them the same, in turns.

usage: serving.py BATON [--servers NAME,...] [--rate R] [--model FOLDER] [--requests N] [--rounds N] [--input-len N]
                  [--output-len N] [--arithmetic NAME] [--threads N] [--venv FOLDER] [--out FOLDER]

NAME is baton, baton-pd (prefill and decode behind the router), vllm, vllm-pd (the same over NIXL), torch (transformers) or
llama.cpp; what is not installed is left out, and why is said. Requests come one at a time, with random prompts; with --rate so
many a second, of which each six begin alike. All have bf16 weights and a thread for each processor; who is not asked waits.
The default model has random weights, 107 million of them, and is made on the first run. Printed are medians over the rounds, and
how many times as long as the first server each other takes. FOLDER gets serving.json, vLLM's report of each round, and logs.
"""
import argparse
import contextlib
import json
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
PREFIXES = 6
PAIR_PORT = 18520  # of vLLM's pair: it takes some of those behind it
COLUMNS = (("time to the first token", "ttft"), ("per token behind it", "tpot"), ("whole answer", "e2el"))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A process and what it starts, in a session of its own."""

    def __init__(self, arguments, name, command, environment=None):
        port = free_port()
        self.name, self.url, self.log = name, f"http://127.0.0.1:{port}", arguments.out / f"{name}.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen([*map(str, command), "--port", str(port)], stdout=log, stderr=log,
                                            env={**os.environ, **(environment or {})}, start_new_session=True)
        arguments.stack.callback(self.close)

    def ready(self, patience=600):
        until = time.monotonic() + patience
        while True:
            try:
                urllib.request.urlopen(self.url + "/health", timeout=5)
                return self
            except OSError:
                if self.process.poll() is not None or time.monotonic() > until:
                    end = self.log.read_text(errors="replace")[-1500:]
                    sys.exit(f"serving: {self.name} does not answer; its log, {self.log}, ends:\n{end}")
            time.sleep(0.2)

    def close(self):
        for number, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.process.pid, number)
                self.process.wait(patience)


def python_of(arguments, name, how):
    if not (arguments.venv / name / "ready").exists():
        raise FileNotFoundError(f"it is not installed: {how}")
    return arguments.venv / name / "bin/python"


def vllm_python(arguments):
    return python_of(arguments, "vllm", "./run vllm installs it")


def baton(arguments, name="baton", *role):
    model = ("--model", arguments.model, "--served-model-name", "m", "--threads", arguments.threads, "--arithmetic", arguments.arithmetic)
    return Server(arguments, name, [arguments.baton, "serve", *(role or ("--role", "all")), *(() if "router" in role else model)])


def baton_pd(arguments):
    prefill, decode = (baton(arguments, f"baton-{role}", "--role", role).ready().url for role in ("prefill", "decode"))
    return baton(arguments, "baton-pd", "--role", "router", "--prefill", prefill, "--decode", decode)


def processors(arguments, python):
    """What vLLM's and torch's guides for CPUs recommend: the threads' number, and Intel's OpenMP and tcmalloc, if installed."""
    found = [*python.parents[1].glob("lib/libiomp5.so"), *pathlib.Path("/usr/lib/x86_64-linux-gnu").glob("libtcmalloc_minimal.so.4")]
    return {"OMP_NUM_THREADS": str(arguments.threads), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
            **({"LD_PRELOAD": ":".join(map(str, found))} if found else {})}


def vllm(arguments):
    python = vllm_python(arguments)
    cpus = sorted(os.sched_getaffinity(0))[:arguments.threads]  # left to itself, vLLM keeps one for its front
    return Server(arguments, "vllm", [python, "-m", "vllm.entrypoints.openai.api_server", "--model", arguments.model,
                                      "--served-model-name", "m", "--dtype", "bfloat16", "--max-model-len", "1024"],
                  {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
                   "VLLM_NO_USAGE_STATS": "1", "VLLM_ENGINE_READY_TIMEOUT_S": "600", **processors(arguments, python)})


def vllm_pd(arguments):
    sys.path.insert(0, str(ROOT / "tests/python/vllm"))
    import pairs
    import servers
    servers.Server.PYTHON, servers.Server.DTYPE = str(vllm_python(arguments)), "bfloat16"
    servers.CALM["OMP_NUM_THREADS"] = str(arguments.threads)
    pair = pairs.Pair("vllm-pd", "nixl", PAIR_PORT, argparse.Namespace(model=arguments.model, logs=arguments.out))
    arguments.stack.push(pair)  # which ends it, also if it does not start
    pair.prefill.ready(), pair.decode.ready()
    return argparse.Namespace(name="vllm-pd", url=pair.proxy.url, log=arguments.out, ready=lambda: None)


def torch(arguments):
    python = vllm_python(arguments)
    return Server(arguments, "torch", [python, HERE / "peer_server.py", "torch", arguments.model, "--threads", arguments.threads],
                  processors(arguments, python))


def llama_cpp(arguments):
    python = python_of(arguments, "llama.cpp", "./run serving install builds it, which takes all cores for minutes")
    file = arguments.out / "model.gguf"
    subprocess.run([python, HERE / "gguf_of.py", arguments.model, file], check=True)
    return Server(arguments, "llama.cpp", [python, HERE / "peer_server.py", "llama.cpp", file, "--tokenizer", arguments.model,
                                           "--threads", arguments.threads])


SERVERS = {"baton": baton, "baton-pd": baton_pd, "vllm": vllm, "vllm-pd": vllm_pd, "torch": torch, "llama.cpp": llama_cpp}


def ask(arguments, server, number):
    """vLLM's report of one round."""
    file = f"{server.name}-{number}.json"
    prompt, answer = str(arguments.input_len), str(arguments.output_len)
    if arguments.rate:
        suffix = max(1, arguments.input_len // 4)
        load = ["--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", str(arguments.input_len - suffix),
                "--prefix-repetition-suffix-len", str(suffix), "--prefix-repetition-num-prefixes", str(PREFIXES),
                "--prefix-repetition-output-len", answer, "--request-rate", str(arguments.rate)]
    else:
        load = ["--dataset-name", "random", "--random-input-len", prompt, "--random-output-len", answer, "--max-concurrency", "1"]
    command = [vllm_python(arguments), HERE / "vllm_command.py", "bench", "serve", "--backend", "openai", "--base-url", server.url,
               "--endpoint", "/v1/completions", "--model", "m", "--tokenizer", arguments.model, *load,
               "--num-prompts", str(arguments.requests), "--num-warmups", "2", "--seed", str(number), "--temperature", "0",
               "--ignore-eos", "--percentile-metrics", "ttft,tpot,e2el", "--disable-tqdm", "--save-result",
               "--result-dir", arguments.out, "--result-filename", file]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    report = json.loads((arguments.out / file).read_text()) if done.returncode == 0 else {"completed": 0}
    if report["completed"] != arguments.requests:
        sys.exit(f"serving: {server.name} answered {report['completed']} of {arguments.requests} requests; its log is {server.log}\n"
                 f"{(done.stdout + done.stderr)[-1500:]}")
    return report


def summary_of(rounds):
    """Of {name: reports}: medians over the rounds, in ms and tokens/s."""
    rows = []
    for name, reports in rounds.items():
        row = {"name": name}
        for _, key in COLUMNS:
            for what in ("median", "p99"):
                row[f"{what}_{key}_ms"] = statistics.median(report[f"{what}_{key}_ms"] for report in reports)
        row["prefill"] = statistics.median(
            1e3 * report["total_input_tokens"] / report["completed"] / report["median_ttft_ms"] for report in reports)
        row["decode"] = 1e3 / row["median_tpot_ms"]
        rows.append(row)
    return rows


def table_of(rows):
    lines = [f"{'median / P99, ms':14} " + "".join(f"{head:>26}" for head, _ in COLUMNS) + "     prefill   decode, tokens/s   ratios"]
    for row in rows:
        cells = "".join(f"{row[f'median_{key}_ms']:16.2f} /{row[f'p99_{key}_ms']:8.2f}" for _, key in COLUMNS)
        ratios = "".join(f" {row[f'median_{key}_ms'] / rows[0][f'median_{key}_ms']:8.2f}" for _, key in COLUMNS)
        lines.append(f"{row['name']:16} {cells} {row['prefill']:11.0f} {row['decode']:8.1f}         {ratios}")
    return "\n".join(lines)


def parse():
    def positive(text):
        if int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
        return int(text)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baton")
    parser.add_argument("--servers", default=",".join(SERVERS), metavar="NAME,...")
    parser.add_argument("--rate", type=float, default=0, help="requests a second; 0: one at a time")
    parser.add_argument("--model")
    parser.add_argument("--requests", type=positive, default=10, help="of a round")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--input-len", type=positive, default=482)
    parser.add_argument("--output-len", type=positive, default=64)
    parser.add_argument("--arithmetic", choices=("fp32", "bf16"), default="bf16", help="Baton's; the others have bf16")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--venv", type=pathlib.Path, default=ROOT / "build/venv")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build/serving")
    arguments = parser.parse_args()
    arguments.servers = arguments.servers.split(",")
    for name in arguments.servers:
        if name not in SERVERS:
            parser.error(f'--servers: "{name}" is not one of {", ".join(SERVERS)}')
    if arguments.output_len < 2:
        parser.error("--output-len must be at least 2: decoding starts after the first token")
    if arguments.model is not None and not (pathlib.Path(arguments.model) / "config.json").exists():
        parser.error(f"--model: there is no config.json in {arguments.model}: it is a folder of Hugging Face's")
    return arguments


def main():
    arguments = parse()
    try:
        vllm_python(arguments)
    except FileNotFoundError as why:
        sys.exit(f"serving: no `vllm bench serve`: {why}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    # The servers have sessions of their own: they end with this, however it is ended.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit("serving: ended by a signal"))
    if arguments.model is None:
        arguments.model = str(arguments.out / "random-llama")
        if not (arguments.out / "random-llama/config.json").exists():
            subprocess.run([sys.executable, ROOT / "tests/models/random_llama.py", arguments.model], check=True)
    with contextlib.ExitStack() as arguments.stack:
        servers = []
        for name in arguments.servers:
            try:
                servers.append(SERVERS[name](arguments))
                servers[-1].ready()  # one after the other: starting takes all processors
            except FileNotFoundError as why:
                print(f"without {name}: {why}", flush=True)
        rounds = {server.name: [] for server in servers}
        for number in range(arguments.rounds):
            for server in servers[number % len(servers):] + servers[:number % len(servers)]:
                rounds[server.name].append(ask(arguments, server, number))
                print(f"round {number + 1}: {server.name}", flush=True)
    rows = summary_of(rounds)
    print(table_of(rows))
    settings = {key: getattr(arguments, key) for key in ("model", "threads", "arithmetic", "rate", "requests", "rounds", "input_len", "output_len")}
    (arguments.out / "serving.json").write_text(json.dumps({**settings, "summary": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
