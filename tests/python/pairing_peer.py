"""Two halves of a pair for a test: a `baton serve` process, and what a worker of another engine has of baton.hand_off, over
a cache whose blocks are packed as one likes."""
import json
import pathlib
import subprocess
import urllib.error
import urllib.request

from packings import packing_of
from ports import free_ports

import baton
from baton import weights
from baton.hand_off import HandOff, KvMemory, Layer, Limits, Order, Run

MODEL = pathlib.Path(__file__).resolve().parents[2] / "models/kjv-1.8m"
LAYERS, HEADS, SIZE = 4, 3, 32  # the model's
BLOCKS = 16


def checkpoint():
    return weights.checkpoint_digest(weights.weights_digest(str(MODEL)), str(MODEL))


def packed(tokens, dtype, order):
    """What baton.vllm says of blocks: as vLLM packs them for AMX ("amx") or for vectors ("vec"), or rows of K and V by
    token, the layers in another order ("rows")."""
    said, layers = packing_of(order, tokens, HEADS, SIZE, dtype), list(range(LAYERS))
    del said["total_heads"], said["first_head"]
    return {**said, "layers": layers[::-1] if order == "rows" else layers}


class Peer:
    """`about`: what it says of itself; None: nothing, as an older baton.vllm. With a `clock` it hears nothing."""

    def __init__(self, name, kv, identity="what vLLMs have in common", about=(), clock=None):
        self.kv, self.name = kv, name
        self.cache = bytearray(LAYERS * BLOCKS * kv["bytes"])
        at = baton.memory_of(self.cache).address
        packing = {"block_tokens": kv["block_tokens"], "bytes": kv["bytes"], "whole": "a peer's"}
        rows = [Layer(at + i * BLOCKS * kv["bytes"], kv["bytes"], kv["bytes"], BLOCKS, packing) for i in range(LAYERS)]
        self.agent = baton.Agent(name + "/0", serve_metadata=True)
        if about == ():
            about = {"model": checkpoint(), "kv": kv}
        self.service = HandOff(self.agent, KvMemory(rows, [(at, len(self.cache))], self.cache), identity,
                               Limits(silence=5, load=60), 30, about=about, clock=clock)
        self.next = 0

    def at(self, row, block):
        start = (row * BLOCKS + block) * self.kv["bytes"]
        return slice(start, start + self.kv["bytes"])

    def blocks(self, tokens):
        """Numbers of so many blocks as they need, scattered."""
        count = -(-tokens // self.kv["block_tokens"])
        self.next += count
        return [(5 * i + 3) % BLOCKS for i in range(self.next - count, self.next)]

    def load(self, params, tokens):
        """What a prefill's answer names; blocks that hold it, or None."""
        blocks = self.blocks(tokens)
        address = params["remote_address"]
        self.service.loads.start(Order("r", params["transfer_id"], params["remote_agent"], address, [Run(0, blocks)],
                                       [(0, tokens)], 1, params["remote_finished"]))
        while not (ended := self.service.loads.take(0.1)).requests:
            pass
        return None if ended.failed else blocks

    def offer(self, transfer, blocks, finished=True):
        """The params with which decode gets them, as a prefill of vLLM's answers."""
        for row in range(LAYERS):
            self.service.sends.save(transfer, row, Run(0, blocks))
        self.service.sends.hold(transfer, transfer)
        return {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer, "remote_agent": self.name,
                "remote_address": f"127.0.0.1:{self.agent.port}", "remote_finished": finished,
                "remote_prefill_cached_tokens": 0}  # vLLM's own word

    def close(self):
        self.service.close()


class Serving:
    """A process of `baton serve`."""

    def __init__(self, binary, *flags):
        self.process = subprocess.Popen([binary, "serve", "--port", "0", *flags], stdout=subprocess.PIPE, text=True)
        self.url = self.address = ""
        for line in self.process.stdout:
            if line.startswith("KV agent: "):
                self.address = line.split()[-1]
            if line.startswith("ready: "):
                self.url = line.split()[-1]
                break

    def ask(self, prompt, tokens=12, **more):
        """(status, answer)"""
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True, **more}
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as why:
            return why.code, json.load(why)

    def metric(self, name):
        with urllib.request.urlopen(self.url + "/metrics", timeout=600) as answer:
            lines = answer.read().decode().splitlines()
        return int(next(line for line in lines if line.startswith(f"baton_{name}")).split()[-1])

    def close(self):
        self.process.terminate()
        self.process.wait()
        self.process.stdout.close()


class Server(Serving):
    """With an agent; `flags` besides."""

    def __init__(self, binary, name, *flags, model=MODEL):
        super().__init__(binary, "--model", str(model), "--served-model-name", "m", "--blocks", "128", "--min-remote-tokens", "16",
                         "--kv-agent", name, "--kv-agent-address", f"127.0.0.1:{free_ports(1)}", *flags)

    def free_blocks(self):
        return self.metric("kv_blocks_free")


class Router(Serving):
    """Before servers."""

    def __init__(self, binary, prefill, decode, *flags):
        super().__init__(binary, "--role", "router", *(word for url in prefill for word in ("--prefill", url)),
                         *(word for url in decode for word in ("--decode", url)), *flags)

    def metric(self, name):
        return super().metric(f"router_{name} ")
