#!/usr/bin/env python3
"""What a memory cgroup or a limit on files leaves too little for is refused, with the limit's name and what to do; nothing is killed.

usage: limits_test.py BATON MODEL
"""
import json
import math
import os
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
import unittest

BATON, MODEL = sys.argv.pop(1), sys.argv.pop(1)
MIB = 1 << 20


class Group:
    """A memory cgroup of its own, below the one of this process."""

    def __init__(self, limit):
        rows = [line.rstrip("\n").split(":", 2) for line in pathlib.Path("/proc/self/cgroup").read_text(encoding="utf8").splitlines(True)]
        for _, controllers, path in rows:
            v2 = controllers == ""
            if not v2 and "memory" not in controllers.split(","):
                continue
            root = pathlib.Path("/sys/fs/cgroup") if v2 else pathlib.Path("/sys/fs/cgroup/memory")
            self.folder = root / path.strip("/") / f"baton-test-{os.getpid()}"
            try:
                self.folder.mkdir()
                (self.folder / ("memory.max" if v2 else "memory.limit_in_bytes")).write_text(str(limit), encoding="utf8")
                return
            except OSError as none:
                why = none
                if self.folder.exists():
                    self.folder.rmdir()
        raise unittest.SkipTest(f"no memory cgroup can be made here: {locals().get('why', 'none is mounted')}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.folder.rmdir()

    def run(self, *command, before=lambda: None):
        def enter():
            (self.folder / "cgroup.procs").write_text(str(os.getpid()), encoding="utf8")
            before()
        return subprocess.run(command, preexec_fn=enter, capture_output=True, text=True, timeout=500, check=False)


def limit_files(size):
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # which Python ignores, and others do not
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


ALLOCATE = """
import baton, sys
with baton.Agent("a", settings={"shm.memfd": "on"}) as agent:
    try:
        memory = agent.allocate(int(sys.argv[1]))
    except baton.BatonError as why:
        sys.exit(str(why))
    memory[0], memory[-1] = 1, 2
    print("allocated", agent.metadata() is not None)
"""


def write_large_model(folder):
    """400 MiB of zeros that take no room on disk."""
    config = json.loads(pathlib.Path(MODEL, "config.json").read_text(encoding="utf8"))
    config.update(hidden_size=2048, intermediate_size=8192, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1)
    pathlib.Path(folder, "config.json").write_text(json.dumps(config), encoding="utf8")
    d, f, q, kv = 2048, 8192, 64, 32
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], d], "model.norm.weight": [d]}
    for layer in range(4):
        for name, shape in (("input_layernorm", [d]), ("self_attn.q_proj", [q, d]), ("self_attn.k_proj", [kv, d]),
                            ("self_attn.v_proj", [kv, d]), ("self_attn.o_proj", [d, q]), ("post_attention_layernorm", [d]),
                            ("mlp.gate_proj", [f, d]), ("mlp.up_proj", [f, d]), ("mlp.down_proj", [d, f])):
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    header, end = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + 2 * math.prod(shape)]}
        end += 2 * math.prod(shape)
    text = json.dumps(header).encode()
    with open(pathlib.Path(folder, "model.safetensors"), "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


class Memory(unittest.TestCase):
    def refused(self, limit, command, *words):
        with Group(limit) as group:
            done = group.run(*command)
        self.assertEqual(done.returncode, 1, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}")
        for word in ("cgroup", *words):
            self.assertIn(word, done.stdout + done.stderr)

    def test_a_kv_cache(self):
        self.refused(400 * MIB, [BATON, "serve", "--model", MODEL, "--port", "0", "--blocks", "400000"], "--blocks")

    def test_weights(self):
        with tempfile.TemporaryDirectory() as folder:
            write_large_model(folder)
            self.refused(200 * MIB, [BATON, "serve", "--model", folder, "--port", "0"], f"the weights in {folder}", "that are left")

    def test_the_memory_of_a_forward_pass(self):
        self.refused(400 * MIB, [BATON, "serve", "--model", MODEL, "--port", "0", "--blocks", "64", "--token-budget", "200000"],
                     "baton serve: ", "that are left", "--token-budget")

    def test_a_tier_in_host_memory(self):
        self.refused(400 * MIB, [BATON, "serve", "--model", MODEL, "--port", "0", "--kv-host-mib", "2000"], "--kv-host-mib")

    def test_ranks_of_a_training(self):
        with tempfile.TemporaryDirectory() as out:
            text = pathlib.Path(out, "text")
            text.write_text("".join(f"{i * 7919 % 65521:x} of {i * 104729 % 65521:x}, and then\n" for i in range(40000)), encoding="utf8")
            self.refused(160 * MIB, [BATON, "train", "--preset", "small", "--data", str(text), "--ranks", "4", "--steps", "2",
                                     "--out", out + "/model"], "rank")

    def test_what_fits_is_given(self):
        with Group(300 * MIB) as group:
            done = group.run(sys.executable, "-c", ALLOCATE, str(16 * MIB))
        self.assertEqual((done.returncode, done.stdout), (0, "allocated True\n"), done.stderr)


class Files(unittest.TestCase):

    def test_a_model_that_is_too_large_a_file(self):
        with tempfile.TemporaryDirectory() as out:
            text = pathlib.Path(out, "text")
            text.write_text("".join(f"{i * 7919 % 65521:x} of {i * 104729 % 65521:x}, and then\n" for i in range(40000)), encoding="utf8")
            done = subprocess.run([BATON, "train", "--preset", "tiny", "--data", str(text), "--steps", "1", "--out", out + "/model"],
                                  preexec_fn=lambda: limit_files(20000), capture_output=True, text=True, timeout=500,
                                  check=False)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("ulimit -f", done.stderr)


if __name__ == "__main__":
    unittest.main()
