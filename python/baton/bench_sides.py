"""The libraries that `python -m baton.bench` measures: one side for each. A side has memory that is registered, metadata
for the other side, transfers, and run(), from post to done."""
from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING, Any, Dict

import numpy

if TYPE_CHECKING:  # older releases of numpy's do not take parameters
    Array = numpy.ndarray[Any, Any]


class BatonSide:
    """One side of a transfer over baton.Agent."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        import baton
        self.agent = baton.Agent(name, require=arguments.require)
        if arguments.memory == "agent":
            self.memory = numpy.frombuffer(self.agent.allocate(arguments.bytes), dtype=numpy.uint8)
        else:
            self.memory = numpy.zeros(arguments.bytes, dtype=numpy.uint8)
            self.agent.register(self.memory)
        self.metadata = self.agent.metadata()
        self.poll = arguments.poll
        self.look = self.agent.messages

    def make(self, op: str, rows: Array, mine: Array, metadata: bytes, their_rows: Array,
             theirs: Array) -> Any:
        """A transfer of mine[i] and theirs[i]."""
        peer = self.agent.add_remote(metadata)
        local, remote = self.agent.prepare(rows), self.agent.prepare(their_rows, peer)
        self.route = self.agent.explain(peer)
        return self.agent.transfer(0 if op == "write" else 1, local, mine, remote, theirs)

    def run(self, transfer: Any) -> None:
        """From post to done."""
        transfer.post()
        if not self.poll:
            return transfer.wait()
        while not transfer.done():
            pass


class NixlSide:
    """The same over NIXL."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        api = nixl_api()
        self.memory = numpy.zeros(arguments.bytes, dtype=numpy.uint8)
        self.agent = api.nixl_agent(name, api.nixl_agent_config())
        self.agent.register_memory([(self.memory.ctypes.data, self.memory.nbytes, 0, "")], "DRAM")
        self.metadata = self.agent.get_agent_metadata()
        self.look = self.agent.get_new_notifs

    def make(self, op: str, rows: Array, mine: Array, metadata: bytes, their_rows: Array,
             theirs: Array) -> Any:
        """A transfer of mine[i] and theirs[i]."""
        peer = self.agent.add_remote_agent(metadata)
        local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows, "DRAM")
        remote = self.agent.prep_xfer_dlist(peer, their_rows, "DRAM")
        return self.agent.make_prepped_xfer(op.upper(), local, mine, remote, theirs)

    def run(self, transfer: Any) -> None:
        """From post to done."""
        state = self.agent.transfer(transfer)
        while state == "PROC":
            state = self.agent.check_xfer_state(transfer)


def nixl_api() -> Any:
    """NIXL itself: not the drop-in, whose module is baton.nixl._api by whatever name."""
    for name in ("nixl_cu12", "nixl_cu13", "nixl"):
        try:
            api = importlib.import_module(name + "._api")
        except ImportError:
            continue
        if not api.nixl_agent.__module__.startswith("baton."):
            return api
    raise ImportError("NIXL is not installed here: ./run nixl puts it into build/venv/nixl")


class MooncakeSide:
    """The same over Mooncake's engine, by tcp. It has no prepared lists: each call takes addresses, and of more than
    some hundreds at once it refuses some."""

    AT_ONCE = 512

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.memory = numpy.zeros(arguments.bytes, dtype=numpy.uint8)
        self.engine = mooncake()()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise SystemExit(f"Mooncake's engine {name} did not start")
        if self.engine.register_memory(self.memory.ctypes.data, self.memory.nbytes) != 0:
            raise SystemExit(f"Mooncake's engine {name} did not register its memory")
        self.metadata = f"127.0.0.1:{self.engine.get_rpc_port()}".encode()

    def make(self, op: str, rows: Array, mine: Array, metadata: bytes, their_rows: Array,
             theirs: Array) -> Any:
        """A transfer of mine[i] and theirs[i]."""
        move = self.engine.batch_transfer_sync_write if op == "write" else self.engine.batch_transfer_sync_read
        here, there, sizes = rows[mine, 0].tolist(), their_rows[theirs, 0].tolist(), rows[mine, 1].tolist()
        parts = [slice(i, i + self.AT_ONCE) for i in range(0, len(here), self.AT_ONCE)]
        return [(move, metadata.decode(), here[part], there[part], sizes[part]) for part in parts]

    @staticmethod
    def run(transfer: Any) -> None:
        """From post to done."""
        for move, *what in transfer:
            if move(*what) != 0:
                raise SystemExit("a transfer of Mooncake's failed")


def mooncake() -> Any:
    """Mooncake's engine."""
    try:
        return importlib.import_module("mooncake.engine").TransferEngine
    except ImportError as why:
        raise ImportError("Mooncake is not installed here: pip install mooncake-transfer-engine-non-cuda") from why


SIDES: Dict[str, Any] = {"baton": BatonSide, "nixl": NixlSide, "mooncake": MooncakeSide}
