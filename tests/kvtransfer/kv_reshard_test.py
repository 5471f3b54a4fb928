#!/usr/bin/env python3
"""Plans between random pairs of KV layouts, against a plain re-shard in numpy: every byte.

A case is a model, two groups of workers (tensor-parallel degrees 1 to 8 each) with caches of their own
shape, and a sequence. numpy fills the sources through strided views, and fills what the targets have
to hold in the same way. kv_reshard_tool runs the plans; all bytes of all targets are compared.

    kv_reshard_test.py TOOL [--pairs N] [--seed S] [--report]
"""

import argparse
import json
import math
import os
import random
import struct
import subprocess
import sys

SKIP = 77
OPAQUE, KEY, VALUE, LATENT, ROPE_KEY, KEY_SCALE, VALUE_SCALE, LATENT_SCALE = range(1, 9)
BYTE, INT8, E4M3, E5M2, FLOAT16, BFLOAT16, FLOAT32 = range(1, 8)
SIZE = {BYTE: 1, INT8: 1, E4M3: 1, E5M2: 1, FLOAT16: 2, BFLOAT16: 2, FLOAT32: 4}

try:
    import numpy as np
except ImportError:
    # The distribution's interpreter has it where another one comes first in the path.
    if sys.executable != "/usr/bin/python3" and os.path.exists("/usr/bin/python3"):
        os.execv("/usr/bin/python3", ["/usr/bin/python3"] + sys.argv)
    print("skipped: this needs numpy (python3-numpy; ./run install-deps all)")
    sys.exit(SKIP)


class Model:
    """What both ends agree on: layers, heads, and the fields of each layer."""

    def __init__(self, rng, tp_limit):
        self.kind = rng.choice(["gqa", "gqa", "gqa", "mla", "hybrid"])
        self.layers = rng.randint(2, 4) if self.kind == "hybrid" else rng.randint(1, 3)
        self.heads = 1 if self.kind == "mla" else rng.choice([1, 2, 3, 4, 8])
        self.window = rng.choice([0, rng.randint(1, 400)]) if self.kind == "hybrid" else 0
        dtype = rng.choice([E4M3, BFLOAT16, BFLOAT16, FLOAT32])
        width = rng.choice([1, 2, 3, 4, 8])
        if self.kind == "mla":
            self.fields = [(LATENT, dtype, width + 4)]
            if rng.random() < 0.5:
                self.fields.append((ROPE_KEY, BFLOAT16, 2))
        else:
            self.fields = [(KEY, dtype, width), (VALUE, dtype, rng.choice([width, width + 1]))]
        if dtype == E4M3:
            pairs = {KEY: KEY_SCALE, VALUE: VALUE_SCALE, LATENT: LATENT_SCALE}
            self.fields += [(pairs[f[0]], FLOAT32, 1) for f in list(self.fields) if f[0] in pairs]
        self.groups = 2 if self.kind == "hybrid" else 1

    def group_layers(self, group):
        return [l for l in range(self.layers) if self.groups == 1 or l % 2 == group]


def shard(total, ranks, rank):
    """[first, end) of the heads that a rank holds: the usual split, replicated beyond `total`."""
    if ranks <= total:
        return rank * total // ranks, (rank + 1) * total // ranks
    head = rank * total // ranks
    return head, head + 1


def worker_side(rng, model, ranks, length):
    """A group of workers whose caches have one shape."""
    style = {
        "block_tokens": [rng.choice([8, 12, 16, 24, 32, 48, 64, 128, 256]) for _ in range(2)],
        "order": rng.choice(["nhd", "hnd", "transposed", "token_last"]),
        "joined": rng.random() < 0.4,
        "per_layer": rng.random() < 0.5,
        "layers_inside": rng.random() < 0.2,
        "gap": rng.choice([0, 0, 4, 12]),
    }
    return [one_worker(rng, model, style, shard(model.heads, ranks, rank), length)
            for rank in range(ranks)]


def one_worker(rng, model, style, heads, length):
    first, end = heads
    count = end - first
    buffers, groups = [], []
    for g in range(model.groups):
        layers = model.group_layers(g)
        window = model.window if g == 1 else 0
        tokens = style["block_tokens"][g]
        kept = length - window if window and length > window else 0
        first_block = kept // tokens
        used = (length - 1) // tokens + 1 - first_block
        blocks = used + rng.randint(0, 2)
        pages = rng.sample(range(blocks), used) if rng.random() < 0.8 else list(range(used))
        fields = lay_out(model, style, layers, blocks, tokens, count, buffers)
        groups.append({"layers": layers, "blocks": blocks, "block_tokens": tokens, "window": window,
                       "total_heads": model.heads, "first_head": first, "heads": count,
                       "first_block": first_block, "pages": pages, "fields": fields})
    return {"buffers": buffers, "groups": groups}


def lay_out(model, style, layers, blocks, tokens, heads, buffers):
    """Strides and places of a group's fields; appends their buffers."""
    joined = style["joined"] and style["order"] in ("nhd", "hnd")
    row = sum(SIZE[dtype] * width for _, dtype, width in model.fields)
    fields, inside = [], 0
    for role, dtype, width in model.fields:
        size = SIZE[dtype]
        line = row if joined else size * width + style["gap"]
        if style["order"] == "nhd":
            strides = [line * heads * tokens, line * heads, line, size]
        elif style["order"] == "hnd":
            strides = [line * heads * tokens, line, line * tokens, size]
        elif style["order"] == "transposed":  # [head][element][token]
            strides = [size * tokens * width * heads, size, size * tokens * width, size * tokens]
        else:  # [element][head][token]
            strides = [size * tokens * width * heads, size, size * tokens, size * tokens * heads]
        fields.append({"role": role, "dtype": dtype, "width": width, "strides": strides,
                       "inside": inside})
        if joined:
            inside += size * width
    # Where layers lie: a buffer for each, one behind the other, or inside each block.
    tensors = [fields] if joined else [[field] for field in fields]
    for tensor in tensors:
        block = tensor[0]["strides"][0]
        if style["layers_inside"] and not style["per_layer"]:
            for field in tensor:
                field["strides"][0] = block * len(layers)
            step, total = block, block * len(layers) * blocks
        else:
            step, total = block * blocks, block * blocks * len(layers)
        for field in tensor:
            if style["per_layer"]:
                field["places"] = [[len(buffers) + i, field["inside"]] for i in range(len(layers))]
            else:
                field["places"] = [[len(buffers), field["inside"] + i * step]
                                   for i in range(len(layers))]
        buffers.extend([block * blocks] * len(layers) if style["per_layer"] else [total])
    for field in fields:
        del field["inside"]
    return fields


def views(worker, memory, g, f):
    """The field's layers as arrays [block][token][head][element] of whole elements."""
    group = worker["groups"][g]
    field = group["fields"][f]
    shape = (group["blocks"], group["block_tokens"], group["heads"], field["width"])
    kind = np.dtype("<u%d" % SIZE[field["dtype"]])
    result = []
    for buffer, offset in field["places"]:
        raw = memory[buffer]
        # Offsets need not be aligned to the element: numpy takes any.
        result.append(np.ndarray(shape, kind, raw.data, offset, field["strides"]))
    return result


def write_tokens(worker, memory, content, g, begin, end):
    """Puts tokens [begin, end) of all heads of the worker where its layout says."""
    group = worker["groups"][g]
    size = group["block_tokens"]
    tokens = np.arange(begin, end)
    pages = np.asarray(group["pages"])[tokens // size - group["first_block"]]
    heads = slice(group["first_head"], group["first_head"] + group["heads"])
    for f in range(len(group["fields"])):
        for layer, view in zip(group["layers"], views(worker, memory, g, f)):
            view[pages, tokens % size] = content[layer][f][begin:end, heads]


def make_case(seed):
    rng = random.Random(seed)
    random_bytes = np.random.default_rng(seed)
    model = Model(rng, 8)
    length = rng.randint(1, rng.choice([20, 100, 300]))
    sources = worker_side(rng, model, rng.randint(1, 8), length)
    targets = worker_side(rng, model, rng.randint(1, 8), length)
    # A prefix that the target has: whole blocks of it, where both are not windowed.
    first = 0
    if model.kind != "hybrid" and rng.random() < 0.3:
        size = targets[0]["groups"][0]["block_tokens"]
        first = rng.randrange(0, length) // size * size
    padded = length + 256
    content = [[random_bytes.integers(0, 256 ** SIZE[dtype], (padded, model.heads, width),
                                      dtype=np.dtype("u%d" % SIZE[dtype]))
                for _, dtype, width in model.fields] for _ in range(model.layers)]

    def memory_of(worker, value):
        return [np.full(size, value, np.uint8) for size in worker["buffers"]]

    source_memory = [memory_of(worker, 0x11) for worker in sources]
    for worker, memory in zip(sources, source_memory):
        for g, group in enumerate(worker["groups"]):
            size = group["block_tokens"]
            begin = group["first_block"] * size
            write_tokens(worker, memory, content, g, begin, begin + len(group["pages"]) * size)
    target_memory = [memory_of(worker, 0xEE) for worker in targets]
    expected = [[raw.copy() for raw in memory] for memory in target_memory]
    moved = counted = 0
    for worker, memory in zip(targets, expected):
        for g, group in enumerate(worker["groups"]):
            unit = math.gcd(group["block_tokens"], sources[0]["groups"][g]["block_tokens"])
            window = group["window"]
            kept = max(first, length - window if window and length > window else 0)
            begin, end = kept // unit * unit, -(-length // unit) * unit
            write_tokens(worker, memory, content, g, begin, end)
            row = sum(f["width"] * SIZE[f["dtype"]] for f in group["fields"])
            token = row * group["heads"] * len(group["layers"])
            moved += (end - begin) * token
            counted += (length - kept) * token
    case = {"length": length, "first": first, "turn": seed, "sources": sources, "targets": targets}
    return case, source_memory, target_memory, expected, moved, counted


def run(tool, seed, process):
    case, source_memory, target_memory, expected, moved, counted = make_case(seed)
    text = json.dumps(case).encode()
    parts = [struct.pack("<I", len(text)), text]
    parts += [raw.tobytes() for memory in source_memory + target_memory for raw in memory]
    process.stdin.write(b"".join(parts))
    process.stdin.flush()
    head = process.stdout.read(8)
    if len(head) < 8:
        sys.exit("case %d: the tool ended" % seed)
    reply = json.loads(process.stdout.read(struct.unpack("<Q", head)[0]))
    if reply["moved"] != moved or reply["counted"] != counted:
        sys.exit("case %d: %s, not %d moved and %d counted" % (seed, reply, moved, counted))
    for rank, memory in enumerate(expected):
        for number, want in enumerate(memory):
            got = np.frombuffer(process.stdout.read(len(want)), np.uint8)
            if not np.array_equal(got, want):
                at = int(np.nonzero(got != want)[0][0])
                sys.exit("case %d: target %d, buffer %d differs at byte %d: %d, not %d"
                         % (seed, rank, number, at, got[at], want[at]))
    return moved


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tool")
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    moved = 0
    with subprocess.Popen([args.tool], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        for seed in range(args.seed, args.seed + args.pairs):
            moved += run(args.tool, seed, process)
        process.stdin.close()
    if process.returncode != 0:
        sys.exit("the tool ended with %d" % process.returncode)
    print("%d pairs of layouts from seed %d: %d bytes moved, every byte of every target is right"
          % (args.pairs, args.seed, moved))


main()
