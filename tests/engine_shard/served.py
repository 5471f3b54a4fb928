"""Servers as real processes, of a model with random weights. sys.argv: the test, BATON, MODELS."""
import array
import atexit
import json
import os
import pathlib
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import urllib.request

BATON, MODELS = sys.argv[1], pathlib.Path(sys.argv[2])
SHAPE = dict(hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=8,
             num_key_value_heads=4, head_dim=16, vocab_size=1024, max_position_embeddings=512)


EXPERTS = dict(model_type="mixtral", intermediate_size=80, num_local_experts=6, num_experts_per_tok=2)


def write_model(folder, seed, experts=False, shape=SHAPE):
    """Random weights behind the tokenizer of another model; a Mixtral's or a Llama's."""
    shutil.copytree(MODELS / "kjv-1.8m", folder)
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    config = json.loads((folder / "config.json").read_text())
    config.update(shape, tie_word_embeddings=True, **(EXPERTS if experts else {}))
    (folder / "config.json").write_text(json.dumps(config))
    d, f = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[of] * config["head_dim"] for of in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], d), "model.norm.weight": (d,)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        shapes |= {name + "input_layernorm.weight": (d,), name + "post_attention_layernorm.weight": (d,),
                   name + "self_attn.q_proj.weight": (q, d), name + "self_attn.k_proj.weight": (kv, d),
                   name + "self_attn.v_proj.weight": (kv, d), name + "self_attn.o_proj.weight": (d, q)}
        if not experts:
            shapes |= {name + "mlp.gate_proj.weight": (f, d), name + "mlp.up_proj.weight": (f, d),
                       name + "mlp.down_proj.weight": (d, f)}
            continue
        name += "block_sparse_moe."
        shapes[name + "gate.weight"] = (EXPERTS["num_local_experts"], d)
        for expert in range(EXPERTS["num_local_experts"]):
            for weight, shape in (("w1", (f, d)), ("w2", (d, f)), ("w3", (f, d))):
                shapes[f"{name}experts.{expert}.{weight}.weight"] = shape
    rng, header, data = random.Random(seed), {}, b""
    for name, dims in shapes.items():
        count = dims[0] * (dims[1] if len(dims) > 1 else 1)
        values = array.array("f", (1.0 if len(dims) == 1 else rng.gauss(0, 0.25) for _ in range(count)))
        header[name] = {"dtype": "F32", "shape": dims, "data_offsets": [len(data), len(data) + 4 * count]}
        data += values.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


class Server:
    """Started, and ready unless it has ended before; everything it says is kept."""

    COMMAND = ("serve", "--port", "0", "--blocks", "64")
    READY = re.compile(r"ready: .* on (http://\S+)")

    def __init__(self, *flags, environment=None):
        self.process = subprocess.Popen(
            [BATON, *self.COMMAND, *map(str, flags)], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})})
        atexit.register(self.process.terminate)  # does nothing to one that has been waited for
        self.said, self.url, self.ready = "", None, threading.Event()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            self.said += line
            if found := self.READY.match(line):
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

    def up(self):
        self.ready.wait()
        assert self.url, self.said
        return self

    def complete(self, **request):
        self.up()
        body = json.dumps({"model": "any", "max_tokens": 24, "ignore_eos": True, **request}).encode()
        call = urllib.request.Request(self.url + "/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(call) as answer:
            return json.load(answer)["choices"]


class Store(Server):
    """A `baton kv_store`; its url is an address."""

    COMMAND = ("kv_store", "--port", "0", "--memory-mib", "64")
    READY = re.compile(r"ready: kv_store on (\S+),")


def check(true, *what):
    if not true:
        sys.exit(" ".join(map(str, ("FAILED:", *what))))


def serve(model, *flags, **more):
    server = Server("--model", model, *flags, **more)
    server.model = model.name
    return server


def stop(server):
    server.process.send_signal(signal.SIGTERM)
    check(server.wait() == 0, "SIGTERM:", server.said)
