"""A drop-in for NIXL 1.5: `from baton.nixl import nixl_agent`. Programs that say `import nixl` find it when the
folder python/names is on their path. docs/from-nixl.md says what is equal, better and missing."""
from ._api import (DEFAULT_COMM_PORT, nixl_agent, nixl_agent_config, nixl_backend_handle, nixl_prepped_dlist_handle,
                   nixl_thread_sync_t, nixl_xfer_handle)

__all__ = ["DEFAULT_COMM_PORT", "nixl_agent", "nixl_agent_config", "nixl_backend_handle", "nixl_prepped_dlist_handle",
           "nixl_thread_sync_t", "nixl_xfer_handle"]
