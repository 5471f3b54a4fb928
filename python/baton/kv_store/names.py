"""Names of KV blocks in a store that several engines share: a fingerprint of all that their bytes follow from."""
from __future__ import annotations

import hashlib
from typing import Any, Dict

from ..weights import weights_digest

_FIELDS = ("weights", "tokenizer", "dtype", "layout", "shard", "adapter", "salt")


class Names:
    """Keys of one identity. Two blocks have one key only where every field and the chained hash are equal.

    weights    a hash over the checkpoint
    tokenizer  that made the tokens, where their numbers do not say it all
    dtype      of K and V
    layout     how a block's bytes are ordered
    shard      which heads and layers of the model
    adapter    LoRA or the like
    salt       of a tenant: equal prompts of two are not shared
    """

    def __init__(self, weights: str, tokenizer: str = "", dtype: str = "", layout: str = "", shard: str = "",
                 adapter: str = "", salt: str = "") -> None:
        if not weights:
            raise ValueError("a name without the weights would match several models' blocks")
        text = _field(b"baton kv store 1")
        for value in (weights, tokenizer, dtype, layout, shard, adapter, salt):
            text += _field(value.encode())
        self._identity = hashlib.sha256(text).digest()

    def key(self, chained: bytes, *more: str) -> bytes:
        """32 bytes. `chained` stands for the block's tokens and all before them; `more`: of the block, as it is."""
        return hashlib.sha256(self._identity + _field(chained) + b"".join(_field(one.encode()) for one in more)).digest()


def names_of(said: Dict[str, Any], **known: str) -> Names:
    """Names from a plug-in's configuration (settled()) and from what the engine knows; a field that both give counts with
    both."""
    fields = settled(said)
    for field, value in known.items():
        fields[field] = f"{value}; {fields[field]}" if fields.get(field) else value
    return Names(**fields)


def settled(said: Dict[str, Any]) -> Dict[str, str]:
    """Fields of Names from a configuration that has "model" (a folder of weights, a file, or a model's name whose files
    are in this machine's cache of the hub: read here) or "weights" (whatever names the checkpoint, the same at every
    engine that has it and only there). ValueError: a field that there is not, or weights that are nowhere."""
    fields = {field: str(value) for field, value in said.items()}
    model = fields.pop("model", None)
    strange = sorted(set(fields) - set(_FIELDS))
    if strange:
        raise ValueError(f"{', '.join(strange)}: not a part of a name; there are model, {', '.join(_FIELDS)}")
    if not fields.get("weights"):
        if not model:
            raise ValueError('which weights? give "model", where the checkpoint lies, or "weights", what names it')
        fields["weights"] = weights_digest(model)
    return fields


def _field(value: bytes) -> bytes:
    """With its length before it, so that none runs into the next."""
    return len(value).to_bytes(8, "little") + value
