"""Decode pulls the KV of one request from two prefill workers that lay theirs out otherwise: each holds half of the
heads, in blocks of 16 tokens, [token][head]; decode has all heads, in blocks of 64, [head][token]. All three live in
this process; in yours, metadata and layouts travel by whatever means the engines have."""
import numpy

import baton

LAYERS, HEADS, SIZE, TOKENS = 2, 8, 64, 100
MODEL = baton.KvModel("sha256 of the checkpoint", dtype="float16")


def cache(agent, blocks, block_tokens, heads, first_head, order):
    """K and V of each layer, registered; and the layout that says so."""
    shape = (blocks, block_tokens, heads, SIZE) if order == "NHD" else (blocks, heads, block_tokens, SIZE)
    tensors = [numpy.zeros(shape, numpy.float16) for _ in range(2 * LAYERS)]
    agent.register(*tensors)
    return tensors, baton.KvLayout(MODEL).add_paged(
        tensors, blocks=blocks, block_tokens=block_tokens, heads=heads, first_head=first_head, total_heads=HEADS,
        head_size=SIZE, dtype=numpy.float16, order=order)


def main():
    prefills = [baton.Agent(f"prefill/{rank}") for rank in range(2)]
    with baton.Agent("decode") as decode, prefills[0], prefills[1]:
        here, mine = cache(decode, 4, 64, HEADS, 0, "HND")
        plans = []
        for rank, prefill in enumerate(prefills):
            there, theirs = cache(prefill, 32, 16, HEADS // 2, rank * HEADS // 2, "NHD")
            for tensor in there:
                tensor[:] = rank + 1
            name, layout = decode.add_remote(prefill.metadata()), baton.KvLayout.decode(theirs.encode())
            plans.append(baton.KvPlan(decode, baton.READ, mine, name, layout))  # once, for all requests

        # A request: its blocks here, and at each prefill.
        pulls = [plan.post([3, 1], [7, 30, 2, 9, 11, 4, 0], tokens=TOKENS, message=b"request 1") for plan in plans]
        for pull in pulls:
            pull.wait(timeout=60)
            pull.release()
        print("decode has heads of", *(int(here[0][3, head, 0, 0]) for head in range(HEADS)), end="; ")
        print(sum(plan.bytes_per_token for plan in plans) // LAYERS, "bytes of each token and layer")


main()
