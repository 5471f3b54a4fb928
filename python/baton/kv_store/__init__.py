"""A store of KV blocks that several engines share, `baton kv_store --lm-port`, and engines' plug-ins for it.
docs/kv-store-plugins.md is the manual.

Reading order: names.py (what a block is called), client.py (the way to the store), then any plug-in."""
from .client import KvStore
from .names import Names, names_of

__all__ = ["KvStore", "Names", "names_of"]
