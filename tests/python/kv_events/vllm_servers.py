"""Two servers of vLLM that publish what they have cached, and Baton's router, which hears it: requests go where their
beginnings are, and what the router expects to find there is what vLLM finds, to the token. One server is killed and
started anew: nothing of it is known until it says what it has.

usage: vllm_servers.py BATON MODEL [--logs FOLDER]"""
import json
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "vllm"))
from proxy import post  # noqa: E402
from servers import Server  # noqa: E402

BATON, MODEL = sys.argv[1], sys.argv[2]
PORT = 18750
PATIENCE = 300  # s


def metric(url, name, label=""):
    """The value of one line, 0 where there is none."""
    with urllib.request.urlopen(url + "/metrics", timeout=60) as page:
        found = re.findall(rf"^{name}\{{[^}}]*{re.escape(label)}[^}}]*\}} (\S+)$", page.read().decode(), re.MULTILINE)
    return int(float(found[0])) if found else 0


def until(what, so):
    end = time.monotonic() + PATIENCE
    while not so():
        if time.monotonic() > end:
            raise RuntimeError(f"after {PATIENCE} s it is not so: {what}")
        time.sleep(0.05)


def vllm(index, folder):
    server = Server(f"events-{index}", MODEL, PORT + index, folder)
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{PORT + 10 + index}",
              "replay_endpoint": f"tcp://*:{PORT + 20 + index}", "topic": "kv-events"}
    server.command += ["--kv-events-config", json.dumps(config)]
    return server


class Router:
    def __init__(self, servers, log):
        listed = [f"{server.url},kv_events=tcp://127.0.0.1:{PORT + 10 + i},replay=tcp://127.0.0.1:{PORT + 20 + i}"
                  for i, server in enumerate(servers)]
        self.process = subprocess.Popen(
            [BATON, "serve", "--role", "router", "--port", "0", "--tokenizer", MODEL, "--hedge-after", "0",
             *(word for one in listed for word in ("--decode", one))], stdout=subprocess.PIPE, stderr=log, text=True)
        self.url = next(line for line in iter(self.process.stdout.readline, "")
                        if line.startswith("ready")).split(" on ")[1].strip()

    def of(self, server, name):
        return metric(self.url, f"baton_router_{name}", f'worker="{server.url}"')

    def close(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()
        self.process.stdout.close()


def hits(server):
    return metric(server.url, "vllm:prefix_cache_hits_total")


def main(folder):
    servers = [vllm(index, folder) for index in range(2)]
    router = None
    with open(folder / "router.log", "wb") as log:
        try:
            for server in servers:
                server.start()
            for server in servers:
                server.ready()
            router = Router(servers, log)
            for server in servers:
                until("the router knows a cache", lambda: router.of(server, "cache_known") == 1)
            before = [hits(server) for server in servers]
            # Six beginnings of 300 to 600 tokens, five ends of each, in any order.
            dice = random.Random(1)
            begins = [[dice.randrange(260, 1000) for _ in range(dice.randint(300, 600))] for _ in range(6)]
            asked = [begin for begin in begins for _ in range(5)]
            dice.shuffle(asked)
            went = {}
            for begin in asked:
                at = [server_metric(server) for server in servers]
                prompt = begin + [dice.randrange(260, 1000) for _ in range(40)]
                status, answer = post(router.url, {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True})
                assert status == 200, answer
                where = [i for i, server in enumerate(servers) if server_metric(server) != at[i]]
                assert len(where) == 1, where
                went.setdefault(id(begin), []).append(where[0])
                settle(router, servers)
            for where in went.values():
                assert len(set(where)) == 1, f"one beginning went to both servers: {where}"
            assert {where[0] for where in went.values()} == {0, 1}, "all went to one server"
            expected = sum(router.of(server, "expected_hit_tokens_total") for server in servers)
            found = sum(hits(server) for server in servers) - sum(before)
            blocks = [router.of(server, "cached_blocks") for server in servers]
            print(f"{len(asked)} requests, {len(begins)} beginnings: the router expected {expected} tokens in the caches, "
                  f"vLLM found {found}; blocks known: {blocks}")
            assert expected == found > 4 * 24 * 128 / 2, (expected, found)

            servers[0].signal(signal.SIGKILL)
            servers[0].process.wait()
            until("the router forgets", lambda: router.of(servers[0], "cache_known") == 0)
            assert router.of(servers[0], "cached_blocks") == 0
            servers[0].start().ready()
            until("the router knows it again", lambda: router.of(servers[0], "cache_known") == 1)
            known = router.of(servers[0], "cached_blocks")
            print(f"one was killed and started anew: {known} blocks known of it, "
                  f"{router.of(servers[1], 'cached_blocks')} of the other")
            assert known < blocks[0], known
            # What the other has it still finds.
            kept = next(begin for begin in begins if went[id(begin)][0] == 1)
            until("the router uses both", lambda: all(router.of(server, "worker_up") == 1 for server in servers))
            at = hits(servers[1])
            status, answer = post(router.url, {"prompt": kept + [300] * 40, "max_tokens": 4, "temperature": 0})
            assert status == 200, answer
            assert hits(servers[1]) - at == len(kept) // 128 * 128, (hits(servers[1]), at)
            print("OK")
        finally:
            if router is not None:
                router.close()
            for server in servers:
                server.close()


def server_metric(server):
    return metric(server.url, "vllm:prefix_cache_queries_total")


def settle(router, servers):
    """Nothing is under way, and what was computed has been told of."""
    until("nothing is under way", lambda: sum(router.of(server, "in_flight") for server in servers) == 0)
    seen = None
    while True:  # the same twice: vLLM publishes a step's events behind its answer
        now = [router.of(server, "kv_event_batches_total") for server in servers]
        if now == seen:
            return
        seen = now
        time.sleep(0.3)


if __name__ == "__main__":
    if "--logs" in sys.argv:
        logs = pathlib.Path(sys.argv[sys.argv.index("--logs") + 1])
        logs.mkdir(parents=True, exist_ok=True)
        main(logs)
    else:
        with tempfile.TemporaryDirectory() as there:
            main(pathlib.Path(there))
