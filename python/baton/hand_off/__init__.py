"""KV of requests from the engine that computes a prompt (prefill) to the one that goes on with it (decode), each with a
cache, a scheduler and a make of its own: which blocks are ready in which layer, their checksums, who still reads them,
when they are free again, and when prefill is given up. An engine that speaks this pairs with vLLM over baton.vllm, which
is made of it, and with `baton serve --kv-agent`. Decode reads; nothing is ever written into another engine.

    agent = baton.Agent("prefill/0", serve_metadata=True, listen_port=14579)
    rows = {"block_tokens": 16, "bytes": 65536, "dtype": "bfloat16", "heads": 8, "head_size": 128,
            "key": {...}, "value": {...}}                     # how a block is packed: baton.kv.find_packing() finds it
    memory = KvMemory([Layer(address, 65536, 65536, blocks, rows) for address in layers], [(begin, bytes)], keep=tensors)
    half = HandOff(agent, memory, "sha256 of the checkpoint")

    half.sends.save("t1", layer, Run(0, [3, 1]))   # prefill: these blocks of a transfer are complete in this layer
    half.sends.hold("t1", "request 1")             # the prompt is computed: its blocks stay as they are ...
    half.sends.finished()                          # ... until this names the request

    half.loads.start(Order("request 1", "t1", "prefill", "10.0.0.1:14579", [Run(0, [7, 8])], [(0, 31)]))   # decode
    ended = half.loads.take(0.01)                  # of which requests all is here; which failed, and are to be computed

What has failed is told when no byte of it moves any more. Caches may differ in block size, order and tensor-parallel
degree (KvPlan); where blocks are alike they move, and are checked, whole. connect-your-engine.md says when to take this
and when baton.KvConnector. hand_off.py names what memory.py describes; all that happens is a session of the library's
(kvtransfer/kv_session.h), with a thread of its own."""
from .hand_off import Done, HandOff, Limits, Loads, Order, Sends, Shard
from .memory import KvMemory, Layer, Packing, Run

__all__ = ["Done", "HandOff", "KvMemory", "Layer", "Limits", "Loads", "Order", "Packing", "Run", "Sends", "Shard"]
