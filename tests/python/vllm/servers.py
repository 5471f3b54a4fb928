"""vLLM servers for a test: one process each, with a log of its own, ended by close(), which leaves nothing of it."""
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import urllib.request

from proxy import post

METRICS = re.compile(r"KV Transfer metrics: .*?Num successful transfers=(\d+).*?Avg xfer time \(ms\)=([\d.]+)"
                     r".*?Avg MB per transfer=([\d.]+)(?:.*?Avg load time \(ms\)=([\d.]+))?")
CALM = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0",  # what waits for work leaves the processors to the others
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOG_STATS_INTERVAL": "1", "CUDA_VISIBLE_DEVICES": "",
        "VLLM_ENGINE_READY_TIMEOUT_S": "600"}


class Server:
    """`wire`: it runs behind that (faults.py); `flags`: of its command line besides."""

    PYTHON, DTYPE = sys.executable, "float32"

    def __init__(self, name, model, port, folder, connector=None, environment=None, wire=None, flags=()):
        self.name, self.url = name, f"http://{wire.THERE if wire else '127.0.0.1'}:{port}"
        self.log = pathlib.Path(folder) / f"{name}.log"
        self.command = [*(wire.inside if wire else ()), self.PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
                        "--served-model-name", "m", "--enforce-eager", "--dtype", self.DTYPE, "--port", str(port),
                        "--max-model-len", "1024", *flags]
        if wire:
            self.command += ["--host", "0.0.0.0"]
        if connector:
            self.command += ["--kv-transfer-config", json.dumps(connector)]
        self.environment = {**os.environ, **CALM, **(environment or {})}
        self.process = None
        self.shared = set()  # files in /dev/shm, which vLLM leaves when it is ended

    def start(self):
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.command, env=self.environment, stdout=log, stderr=log,
                                            start_new_session=True)
        return self

    def signal(self, number):
        """To the server and all that it started."""
        if number == signal.SIGKILL:
            self.note_shared()
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass

    def note_shared(self):
        """By what is mapped: a semaphore was linked to its name when it was."""
        mapped = set()
        for maps in pathlib.Path("/proc").glob("[0-9]*/maps"):
            try:
                if os.getpgid(int(maps.parent.name)) == self.process.pid:
                    mapped.update(map(int, re.findall(r" (\d+) +/dev/shm/", maps.read_text())))
            except OSError:
                pass  # it has ended
        self.shared.update(entry.path for entry in os.scandir("/dev/shm") if entry.inode() in mapped)

    def ready(self):
        """Waits until it answers, and warms it: vllm-cpu 0.32 dies of a first request with one token."""
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended: {self.log.read_text()[-3000:]}")
            try:
                urllib.request.urlopen(self.url + "/health", timeout=5)
                break
            except OSError:
                time.sleep(0.5)
        status, answer = post(self.url, {"model": "m", "prompt": list(range(300, 340)), "max_tokens": 2})
        if status != 200:
            raise RuntimeError(f"{self.name} does not answer: {answer}")
        return self

    def rate(self):
        """(transfers, MB/s, ms each, ms of a load with all that is asked and waited for, or 0) of what its log says of the
        KV that it loaded."""
        count = seconds = size = whole = 0
        for number, ms, mb, load in METRICS.findall(self.log.read_text()):
            count += int(number)
            seconds += int(number) * float(ms) / 1e3
            size += int(number) * float(mb)
            whole += int(number) * float(load or 0) / 1e3
        return (count, size / seconds if seconds else 0, *(1e3 * time / count if count else 0 for time in (seconds, whole)))

    def said(self, what):
        """How many lines of its log have these words."""
        return self.log.read_text().count(what)

    def held(self, patience):
        """Whether blocks of its cache are still in use after so many seconds without requests."""
        until = time.monotonic() + patience
        while True:
            with urllib.request.urlopen(self.url + "/metrics", timeout=60) as answer:
                used = re.findall(r"^vllm:kv_cache_usage_perc\{.*\} (\S+)$", answer.read().decode(), re.MULTILINE)
            if used and not any(map(float, used)):
                return False
            if time.monotonic() > until:
                return True
            time.sleep(0.5)

    def close(self):
        if self.process is not None:
            self.signal(signal.SIGCONT)
            self.note_shared()
            self.signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                pass
            self.signal(signal.SIGKILL)
            self.process.wait()
            for name in self.shared:
                pathlib.Path(name).unlink(missing_ok=True)
