"""What vLLM hands the connector, in vLLM's place: requests, steps of its scheduler, caches, a configuration."""
import pathlib
import tempfile
import types

import baton


def request(name, params=None, tokens=0, status="FINISHED_LENGTH_CAPPED"):
    return types.SimpleNamespace(request_id=name, kv_transfer_params=params, prompt_token_ids=list(range(tokens)),
                                 num_prompt_tokens=tokens, status=types.SimpleNamespace(name=status))


def blocks(*groups):
    """Of each group a list."""
    return types.SimpleNamespace(get_block_ids=lambda: groups)


def scheduled(new=(), cached=(), resumed=()):
    """new: (request, blocks of each group, computed, scheduled); cached the same with the new blocks or None."""
    counts = {row[0]: row[3] for row in (*new, *cached)}
    return types.SimpleNamespace(
        num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()),
        scheduled_new_reqs=[types.SimpleNamespace(req_id=r, block_ids=b, num_computed_tokens=c)
                            for r, b, c, _ in new],
        scheduled_cached_reqs=types.SimpleNamespace(
            req_ids=[row[0] for row in cached], resumed_req_ids=set(resumed),
            new_block_ids=[row[1] for row in cached],
            num_computed_tokens=[row[2] for row in cached]))


class Tensor:
    """A layer's cache, blocks x bytes, as much of a torch tensor as the connector looks at."""

    device, dtype = types.SimpleNamespace(type="cpu"), "uint8"

    def __init__(self, blocks, size):
        self.memory, self.shape = bytearray(blocks * size), (blocks, size)

    def __getitem__(self, block):
        return types.SimpleNamespace(numel=lambda: self.shape[1], stride=lambda: (1,), shape=self.shape[1:])

    def element_size(self):
        return 1

    def stride(self, dimension=None):
        return (self.shape[1], 1)[slice(None) if dimension is None else dimension]

    def data_ptr(self):
        return baton.memory_of(self.memory).address

    def untyped_storage(self):
        return types.SimpleNamespace(data_ptr=self.data_ptr, nbytes=lambda: len(self.memory))


def fake_vllm():
    """The base classes that the connector derives from, in vLLM's place."""
    class Base:
        def __init__(self, config, role, kv_cache_config):
            self.metadata = None

        def _get_connector_metadata(self):
            return self.metadata

        def has_connector_metadata(self):
            return self.metadata is not None

    base = types.SimpleNamespace(KVConnectorBase_V1=Base, KVConnectorMetadata=object, SupportsHMA=object,
                                 KVConnectorTransferResults=types.SimpleNamespace,
                                 KVConnectorRole=types.SimpleNamespace(SCHEDULER=0, WORKER=1))
    return {"vllm.distributed.kv_transfer.kv_connector.v1.base": base,
            "vllm.distributed.kv_transfer.kv_connector.v1.metrics": types.SimpleNamespace(KVConnectorStats=object)}


class FullAttentionSpec:
    def __init__(self, block_size=16):
        self.block_size = block_size


class SlidingWindowSpec(FullAttentionSpec):
    def __init__(self, sliding_window, block_size=16):
        super().__init__(block_size)
        self.sliding_window = sliding_window


class MambaSpec(FullAttentionSpec):
    pass


class UniformTypeKVCacheSpecs(FullAttentionSpec):
    def __init__(self, **specs):
        super().__init__()
        self.kv_cache_specs = specs


def cache_config(**layers):
    """vLLM's KVCacheConfig: a group of one layer for each name and spec."""
    return types.SimpleNamespace(kv_cache_groups=[
        types.SimpleNamespace(layer_names=[name], kv_cache_spec=spec) for name, spec in layers.items()])


# A checkpoint of nothing but the bytes that the digest is of.
_FOLDER = tempfile.TemporaryDirectory()
MODEL = _FOLDER.name
pathlib.Path(MODEL, "model.safetensors").write_bytes(b"weights")


def config(name, rank=0, tp_size=1, **more):
    extra = {"name": name, "port": 0, **more}
    transfer = types.SimpleNamespace(engine_id="engine", kv_port=1, kv_load_failure_policy="recompute",
                                     get_from_extra_config=lambda key, default: extra.get(key, default))
    return types.SimpleNamespace(kv_transfer_config=transfer, 
                                 parallel_config=types.SimpleNamespace(rank=rank, tensor_parallel_size=tp_size),
                                 cache_config=types.SimpleNamespace(block_size=16, cache_dtype="auto"),
                                 load_config=types.SimpleNamespace(load_format="auto", download_dir=None),
                                 model_config=types.SimpleNamespace(hf_config="a model", dtype="float", model=MODEL,
                                                                    get_total_num_kv_heads=lambda: 2))
