"""Prefill and decode of Baton beside other engines on the same processor: torch (transformers), vLLM and llama.cpp.

usage: baselines.py BATON [--arithmetic NAME,...] [--baseline NAME,...] [--model FOLDER] [--rounds N] [--requests N]
                    [--input-len N] [--output-len N] [--threads N] [--realtime] [--venv FOLDER] [--out FOLDER]

Each engine serves the same checkpoint (default: one with random weights, 107 million parameters, made on the first run), whose
weights are bf16, with so many threads. Baton computes in each arithmetic that --arithmetic names, a row each; left to itself
(auto) in bf16, as the others do, where the processor multiplies bf16, else in fp32.
`baton serve_bench` asks them one request at a time, in turns, round by round; all others are
stopped (SIGSTOP) meanwhile. Prints prefill tokens/s (of the prompt, by the time to the first token) and decode tokens/s (by
the time per token behind it), medians, with each arithmetic's ratio to each: the median of the rounds' ratios. Writes
FOLDER/baselines.json, and a log of each. An engine that is not installed is left out, and why is said. On a machine that has
other work too, --realtime (as root) gives all of them real-time priority: threads that wait for each other suffer most from it.
Whose tokens arrive all at once, which real-time priority can do to a server, has no row and no ratios: neither its first token
nor those behind it came when they were made. That is said instead.
"""
import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
# A token arrives by itself if it came so many seconds behind the one before, or such a part of what its answer took for a token.
APART = (1e-4, 0.02)
# The share of an answer's tokens that must arrive by themselves, or its times are not the engine's.
LEAST_APART = 0.5
GOALS = (("prefill", 1.5, ("torch", "vllm", "llama.cpp")), ("decode", 2.0, ("llama.cpp",)))


class Server:
    """A process and what it starts, in a session of its own: stopped and continued as one."""

    def __init__(self, name, command, log, environment=None, url=None):
        self.name, self.url, self.log = name, url, log
        with open(log, "wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **(environment or {})},
                                            start_new_session=True)

    def ready(self, patience=600):
        """Waits until it answers. Where it chose its port it says its address in its log."""
        until = time.monotonic() + patience
        while True:
            text = self.log.read_text(errors="replace")
            if self.url is None and " on http://" in text:
                self.url = "http://" + text.split(" on http://")[1].split()[0]
            if self.url is not None:
                try:
                    urllib.request.urlopen(self.url + "/health", timeout=5)
                    return self
                except OSError:
                    pass
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{self.name} does not answer; its log, {self.log}, ends:\n{text[-1500:]}")
            time.sleep(0.2)

    def signal(self, number):
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass

    def hurry(self):
        """Real-time priority for all of its threads, so that other work on the machine waits."""
        for task in pathlib.Path("/proc").glob("[0-9]*/task/[0-9]*"):
            try:
                if os.getsid(int(task.parts[2])) == self.process.pid:
                    os.sched_setscheduler(int(task.name), os.SCHED_FIFO, os.sched_param(1))
            except ProcessLookupError:
                pass
            except PermissionError:
                sys.exit("baselines: --realtime needs root, or CAP_SYS_NICE: leave it out on a machine that does nothing else")

    def close(self):
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        self.signal(signal.SIGKILL)
        self.process.wait()


def python_of(venv, *names):
    """The first environment that is whole."""
    for name in names:
        if (venv / name / "ready").exists():
            return venv / name / "bin/python"
    return None


def preloaded(python):
    """The environment that vLLM's and torch's guides for CPUs recommend: Intel's OpenMP and tcmalloc, if installed."""
    home = python.parents[1]
    found = [*home.glob("lib/libiomp5.so"), *pathlib.Path("/usr/lib/x86_64-linux-gnu").glob("libtcmalloc_minimal.so.4")]
    return {"LD_PRELOAD": ":".join(map(str, found))} if found else {}


def baton_server(arithmetic):
    def start(arguments):
        command = [arguments.baton, "serve", "--port", "0", "--role", "all", "--model", arguments.model, "--served-model-name", "m",
                   "--threads", str(arguments.threads), "--arithmetic", arithmetic]
        return Server(f"baton {arithmetic}", command, arguments.out / f"baton-{arithmetic}.log")
    return start


def fitting_arithmetic(cpuinfo):
    """(arithmetic, why), of what /proc/cpuinfo says."""
    flags = next((line.split(":")[1].split() for line in cpuinfo.splitlines() if line.startswith("flags")), [])
    for flag in ("amx_bf16", "avx512_bf16"):
        if flag in flags:
            return "bf16", f"the processor has {flag}"
    return "fp32", "the processor does not multiply bf16"


def computed_by(server):
    """The line about its arithmetic that `baton serve` prints when it starts."""
    said = [line for line in server.log.read_text(errors="replace").splitlines() if line.startswith("arithmetic: ")]
    return said[0].removeprefix("arithmetic: ") if said else server.name.removeprefix("baton ")


def torch_server(arguments):
    python = python_of(arguments.venv, "vllm", "models")
    if python is None:
        return "transformers is not installed: ./run vllm or ./run models installs it"
    command = [python, HERE / "peer_server.py", "torch", arguments.model, "--threads", str(arguments.threads)]
    environment = {"OMP_NUM_THREADS": str(arguments.threads), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
                   **preloaded(python)}
    return Server("torch", command, arguments.out / "torch.log", environment)


def vllm_server(arguments):
    python = python_of(arguments.venv, "vllm")
    if python is None:
        return "it is not installed: ./run vllm installs it"
    url = f"http://127.0.0.1:{arguments.port}"
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", arguments.model, "--served-model-name", "m",
               "--dtype", "bfloat16", "--port", str(arguments.port), "--max-model-len", "1024", *arguments.vllm.split()]
    # Left to itself, vLLM keeps one of so few processors for its front.
    cpus = sorted(os.sched_getaffinity(0))[:arguments.threads]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
                   "OMP_NUM_THREADS": str(arguments.threads), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
                   "CUDA_VISIBLE_DEVICES": "", "VLLM_ENGINE_READY_TIMEOUT_S": "600", **preloaded(python)}
    return Server("vllm", command, arguments.out / "vllm.log", environment, url)


def llama_cpp_server(arguments):
    python = python_of(arguments.venv, "llama.cpp")
    if python is None:
        return "it is not installed: ./run baselines install builds it, which takes both cores for minutes"
    file = arguments.out / "model.gguf"
    newest = max(path.stat().st_mtime for path in pathlib.Path(arguments.model).iterdir())
    if not file.exists() or file.stat().st_mtime < newest:
        subprocess.run([python, HERE / "gguf_of.py", arguments.model, file], check=True)
    command = [python, HERE / "peer_server.py", "llama.cpp", file, "--tokenizer", arguments.model,
               "--threads", str(arguments.threads)]
    return Server("llama.cpp", command, arguments.out / "llama.cpp.log")


BASELINES = {"torch": torch_server, "vllm": vllm_server, "llama.cpp": llama_cpp_server}


def checkpoint(arguments):
    """The one of random weights, where none was named."""
    if arguments.model is None:
        arguments.model = str(arguments.out / "random-llama")
        if not (arguments.out / "random-llama/config.json").exists():
            subprocess.run([sys.executable, ROOT / "tests/models/random_llama.py", arguments.model], check=True)


def ask(arguments, server, seed, requests):
    """Tokens/s of each request, (prefill, decode), and the part of tokens that arrived by themselves."""
    report = arguments.out / f"{server.name.replace(' ', '-')}.json"
    command = [arguments.baton, "serve_bench", "--url", server.url, "--model", "m", "--dataset-name", "random", "--input-len",
               str(arguments.input_len), "--output-len", str(arguments.output_len), "--num-prompts", str(requests),
               "--max-concurrency", "1", "--temperature", "0", "--seed", str(seed), "--json", report, "--save-detailed"]
    if arguments.realtime:
        command = ["chrt", "-f", "1", *command]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{server.name}: {done.stderr.strip()}; its log is {server.log}")
    said = json.loads(report.read_text())
    return speeds_of(said), part_apart(said)


def speeds_of(report):
    speeds = []
    for tokens, made, first, whole in zip(report["input_lens"], report["output_lens"], report["ttfts"], report["e2els"]):
        speeds.append((tokens / first, (made - 1) / (whole - first)))
    return [statistics.median(values) for values in zip(*speeds)]


def part_apart(report):
    """The number of an answer's tokens that arrived separately, as the median of the answers. Between pieces of one packet are only
    the microseconds that it takes to read them."""
    parts = []
    for made, gaps, whole in zip(report["output_lens"], report["itls"], report["e2els"]):
        parts.append((1 + sum(gap > min(APART[0], APART[1] * whole / made) for gap in gaps)) / made)
    return statistics.median(parts)


def refused_of(apart, output_len):
    """{name: why it has no row}, of the parts of each round."""
    return {name: f"no row for {name}: its tokens arrive at once ({min(parts) * output_len:.0f} of {output_len} by themselves; "
                  f"at least {LEAST_APART * output_len:g} must), so their times are not when it made them; try without --realtime"
            for name, parts in apart.items() if min(parts) < LEAST_APART}


def measure(arguments, servers):
    """{name: [(prefill, decode) of each round]}, {name: [the part of tokens by themselves in each round]}"""
    rounds = {server.name: [] for server in servers}
    apart = {server.name: [] for server in servers}
    for server in servers:
        server.signal(signal.SIGSTOP)
        if arguments.realtime:
            server.hurry()
    for number in range(-1, arguments.rounds):  # the first is not counted
        for i in range(len(servers)):
            server = servers[(i + number) % len(servers)]
            server.signal(signal.SIGCONT)
            found, part = ask(arguments, server, 1 + (number + 1) * 1000, arguments.requests if number >= 0 else 2)
            server.signal(signal.SIGSTOP)
            if number >= 0:
                rounds[server.name].append(found)
                apart[server.name].append(part)
                said = f"prefill {found[0]:8.0f}  decode {found[1]:7.1f} tokens/s"
                print(f"round {number + 1}: {server.name:10} {said if part >= LEAST_APART else 'tokens arrive at once'}", flush=True)
    return rounds, apart


def is_own(name):
    return name.startswith("baton ")


def summary_of(rounds):
    """[(name, prefill, decode, {arithmetic: its ratios in prefill and in decode})]: medians."""
    rows = []
    for name, other in rounds.items():
        medians = [statistics.median(values) for values in zip(*other)]
        ratios = {own.removeprefix("baton "): [statistics.median(a[i] / b[i] for a, b in zip(rounds[own], other)) for i in (0, 1)]
                  for own in rounds if is_own(own)}
        rows.append((name, *medians, ratios))
    return rows


def table_of(rows, refused=None):
    """Behind the rows is said who has none."""
    owns = list(rows[0][3]) if rows else []
    heads = "".join(f" {f'{own} prefill':>13} {'decode':>7}" for own in owns)
    lines = [f"{'':10} {'prefill':>9} {'decode':>8} tokens/s   ratio of{heads}"]
    for name, prefill, decode, ratios in rows:
        said = "" if is_own(name) else " " * 19 + "".join(f" {a:13.2f} {b:7.2f}" for a, b in ratios.values())
        lines.append(f"{name:10} {prefill:9.0f} {decode:8.1f} {said}".rstrip())
    lines.extend((refused or {}).values())
    for own in owns:
        for i, (what, goal, names) in enumerate(GOALS):
            there = [(row[0], row[3][own][i]) for row in rows if row[0] in names]
            if there:
                worst = min(ratio for _, ratio in there)
                lines.append(f"{own}, {what}: {worst:.2f} times the best of {', '.join(name for name, _ in there)}; goal {goal:g}: "
                             f"{'reached' if worst >= goal else 'missed'}")
    return "\n".join(lines)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baton")
    parser.add_argument("--arithmetic", default="auto", metavar="NAME,...", help="of auto, fp32, bf16")
    parser.add_argument("--baseline", default=",".join(BASELINES), metavar="NAME,...")
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=10, help="of a round")
    parser.add_argument("--input-len", type=int, default=482)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--realtime", action="store_true")
    parser.add_argument("--port", type=int, default=18600, help="vLLM's")
    parser.add_argument("--vllm", default="", metavar="OPTIONS", help="more options of vLLM's server, such as --enforce-eager")
    parser.add_argument("--venv", type=pathlib.Path, default=ROOT / "build/venv")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build/serving/baselines")
    arguments = parser.parse_args()
    arguments.baseline = [name for name in arguments.baseline.split(",") if name]
    for name in arguments.baseline:
        if name not in BASELINES:
            parser.error(f'--baseline: "{name}" is not one of {", ".join(BASELINES)}')
    arguments.arithmetic = [name for name in arguments.arithmetic.split(",") if name]
    for name in arguments.arithmetic:
        if name not in ("auto", "fp32", "bf16"):
            parser.error(f'--arithmetic: "{name}" is not one of auto, fp32, bf16')
    if not arguments.arithmetic:
        parser.error("--arithmetic: name one of auto, fp32, bf16")
    for flag in ("rounds", "requests", "input_len", "threads"):
        if getattr(arguments, flag) < 1:
            parser.error(f"--{flag.replace('_', '-')} must be at least 1")
    if arguments.model is not None and not (pathlib.Path(arguments.model) / "config.json").exists():
        parser.error(f"--model: there is no config.json in {arguments.model}: it is a folder of Hugging Face's")
    if arguments.output_len < 2:
        parser.error("--output-len must be at least 2: decoding starts after the first token")
    return arguments


def main():
    arguments = parse()
    # The servers have sessions of their own: they end with this, however it is ended.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit("baselines: ended by a signal"))
    arguments.out.mkdir(parents=True, exist_ok=True)
    checkpoint(arguments)
    if "auto" in arguments.arithmetic:
        fitting, why = fitting_arithmetic(pathlib.Path("/proc/cpuinfo").read_text())
        arguments.arithmetic = [fitting if name == "auto" else name for name in arguments.arithmetic]
        print(f"arithmetic: {fitting}, since {why}", flush=True)
    arguments.arithmetic = list(dict.fromkeys(arguments.arithmetic))
    servers, computed = [], {}
    try:
        for name, start in (*((f"baton {name}", baton_server(name)) for name in arguments.arithmetic),
                            *((name, BASELINES[name]) for name in arguments.baseline)):
            server = start(arguments)
            if isinstance(server, str):
                print(f"without {name}: {server}", flush=True)
                continue
            servers.append(server)
            server.ready()  # one after the other: starting takes all processors
            if is_own(name):
                computed[name.removeprefix("baton ")] = computed_by(server)
                print(f"{name}: {computed_by(server)}", flush=True)
        rounds, apart = measure(arguments, servers)
    except RuntimeError as error:
        sys.exit(f"baselines: {error}")
    finally:
        for server in servers:
            server.close()
    refused = refused_of(apart, arguments.output_len)
    rows = summary_of({name: speeds for name, speeds in rounds.items() if name not in refused})
    print(table_of(rows, refused))
    (arguments.out / "baselines.json").write_text(json.dumps({
        "model": arguments.model, "threads": arguments.threads, "input_len": arguments.input_len,
        "output_len": arguments.output_len, "requests": arguments.requests, "computed": computed, "rounds": rounds,
        "apart": apart, "refused": refused,
        "summary": [dict(zip(("name", "prefill", "decode", "ratios"), row)) for row in rows]}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
