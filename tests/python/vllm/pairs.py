"""Pairs of servers, prefill and decode, and the proxy before them: by kind of hand-off."""
import pathlib

from proxy import Proxy
from servers import Server

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
LIBRARY = {"LD_LIBRARY_PATH": str(ROOT / "build/release/capi")}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
LEASE = 15  # s
TP = "--tensor-parallel-size"


class Pair:
    """`over`: baton, nixl, or dropin, which is NixlConnector over baton.nixl. `name` is of its logs. For baton only:
    prefill behind a `wire` (faults.py), with a model of its own, decode's connector from another module, `flags` of each
    for its command line."""

    AGENT = "prefill"

    def __init__(self, name, over, port, arguments, wire=None, model=None, module="baton.vllm",
                 flags=((), ())):
        servers = []
        for i, end in enumerate(("prefill", "decode")):
            behind = None if i else wire
            if over == "baton":
                connector, more = self._baton(end, port + 10 + 10 * i, wire, module if i else "baton.vllm")
            else:
                connector, more = NIXL, {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + 10 + 10 * i), "UCX_MODULES": "^ib"}
            if over == "dropin":
                more.update({"PYTHONPATH": f"{ROOT}/python:{ROOT}/python/names", **LIBRARY})
            servers.append(Server(f"{name}-{end}", (None if i else model) or arguments.model, port + i, arguments.logs,
                                  connector, more, behind, flags[i]).start())
        self.prefill, self.decode = servers
        self.wire, self.port = wire, port
        self.tp_sizes = [int(each[each.index(TP) + 1]) if TP in each else 1 for each in flags]
        self.proxy = Proxy(self.prefill.url, self.decode.url, "", self.address(0), self.tp_sizes[0])

    def address(self, end):
        """Of an agent, as a proxy says it."""
        return f"{self.wire.THERE if self.wire else '127.0.0.1'}:{self.port + 10 + 10 * end}"

    def turn_round(self):
        """Who was decode is prefill, and the other way."""
        self.prefill, self.decode = self.decode, self.prefill
        self.proxy.prefill, self.proxy.decode = self.prefill.url, self.decode.url
        self.proxy.address, self.proxy.tp_size = self.address(1), self.tp_sizes[1]

    def __enter__(self):
        self.prefill.ready(), self.decode.ready()
        return self

    def __exit__(self, *_):
        self.proxy.close(), self.prefill.close(), self.decode.close()

    def leaks(self):
        """The names of servers in which blocks are still in use when every lease has ended."""
        return [server.name for server in (self.prefill, self.decode) if server.held(LEASE + 30)]

    @staticmethod
    def _baton(end, port, wire, module):
        extra = {"name": end, "port": port, "lease": LEASE}
        if wire:
            extra["host"] = wire.THERE if end == "prefill" else wire.HERE
        return ({"kv_connector": "BatonConnector", "kv_connector_module_path": module, "kv_role": "kv_both",
                 "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra},
                {"PYTHONPATH": f"{ROOT}/python:{HERE}", "VLLM_HOST_IP": "127.0.0.1", **LIBRARY})
