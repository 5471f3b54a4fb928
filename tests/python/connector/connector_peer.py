"""A prefill engine of connector_test.py in a process of its own; KV is what the tokens say.

usage: connector_peer.py [STOP_BEFORE_LAYER]"""
import sys
import time

import numpy

import baton

LAYERS, HEADS, SIZE = 4, 2, 8
MODEL = "sha256:of the test"


class Cache:
    """K and V of some layers; what `of` a token is, both sides know."""

    def __init__(self, blocks, tokens, order):
        self.tokens = tokens
        shape = (2, blocks, tokens, HEADS, SIZE) if order == "NHD" else (2, blocks, HEADS, tokens, SIZE)
        self.tensors = [numpy.zeros(shape, numpy.uint16) for _ in range(LAYERS)]
        self.layout = baton.KvLayout(MODEL).add_paged(self.tensors, blocks=blocks, block_tokens=tokens, heads=HEADS,
                                                      head_size=SIZE, dtype="bfloat16", order=order, pair="stacked")
        self.views = [tensor if order == "NHD" else tensor.swapaxes(2, 3) for tensor in self.tensors]

    def compute(self, layer, blocks, tokens):
        """The KV of these tokens, into these blocks."""
        for i, token in enumerate(tokens):
            self.views[layer][:, blocks[i // self.tokens], i % self.tokens] = self.of(layer, token)

    def holds(self, layer, blocks, tokens, first=0):
        return all((self.views[layer][:, blocks[(i - first) // self.tokens], i % self.tokens] == self.of(layer, token)).all()
                   for i, token in enumerate(tokens) if i >= first)

    @staticmethod
    def of(layer, token):
        return token * 31 + layer * 7 + 1


def prefill(stop_before):
    """Computes what is asked for, for ever; the payload is the number of tokens. Tells its address first."""
    with baton.KvConnector("prefill-0", allow_pull=True) as connector:
        cache = Cache(64, 16, "NHD")
        connector.register_cache(cache.layout, keep=cache)
        print(connector.address, flush=True)
        while True:
            job = connector.next_job()
            if job is None:
                try:
                    connector.wait(5)
                except baton.BatonTimeoutError:
                    pass
                continue
            blocks = list(range(-(-len(job.tokens) // 16)))
            for layer in range(LAYERS):
                if layer == stop_before:
                    print("stands", flush=True)
                    time.sleep(3600)
                cache.compute(layer, blocks, job.tokens)
                job.save_layer(layer, blocks)
            job.finish(payload=b"%d tokens" % len(job.tokens))
            job.wait_saved(60)


if __name__ == "__main__":
    prefill(int(sys.argv[1]) if sys.argv[1:] else -1)
