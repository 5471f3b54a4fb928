#!/usr/bin/env python3
"""`baton serve --tensor-parallel-size N` as real processes: the answers of one process, and an end for
everybody when a rank dies.

usage: serve_ranks_test.py BATON MODELS
"""
import array
import atexit
import http.client
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request

BATON, MODELS = sys.argv[1], pathlib.Path(sys.argv[2])
SHAPE = dict(hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=8,
             num_key_value_heads=4, head_dim=16, vocab_size=1024, max_position_embeddings=512)


def write_model(folder, seed):
    """Random weights behind the tokenizer of another model."""
    shutil.copytree(MODELS / "kjv-1.8m", folder)
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    config = json.loads((folder / "config.json").read_text())
    config.update(SHAPE, tie_word_embeddings=True)
    (folder / "config.json").write_text(json.dumps(config))
    d, f, kv = SHAPE["hidden_size"], SHAPE["intermediate_size"], 64
    shapes = {"model.embed_tokens.weight": (SHAPE["vocab_size"], d), "model.norm.weight": (d,)}
    for layer in range(SHAPE["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        shapes |= {name + "input_layernorm.weight": (d,), name + "post_attention_layernorm.weight": (d,),
                   name + "self_attn.q_proj.weight": (128, d), name + "self_attn.k_proj.weight": (kv, d),
                   name + "self_attn.v_proj.weight": (kv, d), name + "self_attn.o_proj.weight": (d, 128),
                   name + "mlp.gate_proj.weight": (f, d), name + "mlp.up_proj.weight": (f, d),
                   name + "mlp.down_proj.weight": (d, f)}
    rng, header, data = random.Random(seed), {}, b""
    for name, shape in shapes.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        values = array.array("f", (1.0 if len(shape) == 1 else rng.gauss(0, 0.25) for _ in range(count)))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + 4 * count]}
        data += values.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


class Server:
    """Started, and ready unless it has ended before; everything it says is kept."""

    def __init__(self, *flags, environment=None):
        self.process = subprocess.Popen(
            [BATON, "serve", "--port", "0", "--blocks", "64", *map(str, flags)], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})})
        atexit.register(self.process.terminate)  # does nothing to one that has been waited for
        self.said, self.url, self.ready = "", None, threading.Event()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            self.said += line
            if found := re.match(r"ready: .* on (http://\S+)", line):
                self.url = found[1]
                self.ready.set()
        self.ready.set()

    def wait(self):
        """The exit status, once every process that could write here has ended."""
        status = self.process.wait()
        self.reader.join()
        return status

    def children(self):
        path = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        return [int(pid) for pid in pathlib.Path(path).read_text().split()]

    def complete(self, **request):
        self.ready.wait()
        assert self.url, self.said
        body = json.dumps({"model": "any", "max_tokens": 24, "ignore_eos": True, **request}).encode()
        call = urllib.request.Request(self.url + "/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(call) as answer:
            return json.load(answer)["choices"]


def check(true, *what):
    if not true:
        sys.exit(" ".join(map(str, ("FAILED:", *what))))


REQUESTS = [dict(prompt="In the beginning", temperature=0), dict(prompt="And it came to pass " * 12, temperature=0.9, seed=7),
            dict(prompt=["Who art thou", "Let there be light"], n=2, temperature=1.3, seed=3),
            dict(prompt="And God said", temperature=0, echo=True, logprobs=2)]


def answers(server):
    """All at once, so that they are batched."""
    out = [None] * len(REQUESTS)

    def ask(i):
        out[i] = server.complete(model=server.model, **REQUESTS[i])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(REQUESTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


def serve(model, *flags, **more):
    server = Server("--model", model, *flags, **more)
    server.model = model.name
    return server


def stop(server):
    server.process.send_signal(signal.SIGTERM)
    check(server.wait() == 0, "SIGTERM:", server.said)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def same_answers(model):
    for arithmetic in ("fp32", "bf16"):
        alone = serve(model, "--arithmetic", arithmetic)
        expected = answers(alone)
        stop(alone)
        for flags in (("--tensor-parallel-size", 2), ("-tp", 4)):
            ranks = serve(model, "--arithmetic", arithmetic, *flags)
            got = answers(ranks)
            check(got == expected, flags, arithmetic, "\n", expected, "\n", got)
            check(len(ranks.children()) == flags[1], "ranks of", flags, ranks.children())
            stop(ranks)


def by_hand(model):
    """Two processes that nobody forked, as on two machines; and one that was started otherwise."""
    alone = serve(model)
    expected = answers(alone)
    stop(alone)
    place = {"BATON_RANKS": "2", "BATON_RENDEZVOUS": f"127.0.0.1:{free_port()}"}
    ranks = [serve(model, "-tp=2", environment={**place, "BATON_RANK": str(rank)}) for rank in range(2)]
    check(answers(ranks[0]) == expected, "ranks started by hand")
    stop(ranks[0])
    check(ranks[1].wait() == 0, "the other rank ends with rank 0:", ranks[1].said)

    place["BATON_RENDEZVOUS"] = f"127.0.0.1:{free_port()}"
    ranks = [serve(model, "-tp", 2, "--token-budget", 64 + rank, environment={**place, "BATON_RANK": str(rank)})
             for rank in range(2)]
    for rank in ranks:
        check(rank.wait() == 1, "other settings:", rank.said)
        check('--token-budget is "64" at rank 0 and "65" at rank 1' in rank.said, rank.said)

    place["BATON_RANK"] = "0"
    wrong = serve(model, "-tp", 4, environment=place)
    check(wrong.wait() == 1 and "started 2 ranks" in wrong.said, wrong.said)


def dead_ranks(model):
    """Whichever rank is killed, idle or in the middle of a stream: everything ends, and says why."""
    for victim in (0, 1):
        for busy in (False, True):
            server = serve(model, "-tp", 2)
            server.complete(model=model.name, prompt="In the beginning", max_tokens=1)
            children = server.children()
            if busy:
                body = json.dumps({"model": model.name, "prompt": "And", "max_tokens": 480, "ignore_eos": True,
                                   "stream": True}).encode()
                call = urllib.request.Request(server.url + "/v1/completions", body,
                                              {"Content-Type": "application/json"})
                stream = urllib.request.urlopen(call)
                check(stream.readline().startswith(b"data: "), "a stream")
            os.kill(children[victim], signal.SIGKILL)
            if busy:
                try:
                    stream.read()  # to an end of some kind: nobody waits for ever
                except (OSError, http.client.HTTPException):
                    pass
            check(server.wait() != 0, "a server without all of its ranks:", server.said)
            check(f"rank {victim} was killed by signal 9" in server.said, server.said)
            check(not any(pathlib.Path(f"/proc/{pid}").exists() for pid in children), "left behind:", children)


def refusals(model):
    for flags, what in ((("-tp", 3), "3 does not divide the model's 4 KV heads"),
                        (("-tp", 2, "--role", "decode"), "--role all"),
                        (("-tp", 2, "--kv-host-mib", 8), "--kv-host-mib"),
                        (("-tp", 0), "--tensor-parallel-size"),
                        (("-tp", "two"), "--tensor-parallel-size")):
        server = serve(model, *flags)
        check(server.wait() != 0 and what in server.said, flags, server.said)
        check(len(server.said.splitlines()) <= 2, "more than one line:", server.said)
    gone = Server("--model", model.parent / "none", "-tp", 2)
    check(gone.wait() != 0 and "there is no model directory" in gone.said, gone.said)


with tempfile.TemporaryDirectory() as folder:
    model = pathlib.Path(folder) / "random"
    write_model(model, 1)
    for test in (refusals, same_answers, by_hand, dead_ranks):
        test(model)
        print(test.__name__, "ok", flush=True)
