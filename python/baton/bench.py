"""Scattered pages between two processes of this machine, as an engine moves its KV cache: prepared and posted by
Python, from post to done.

    python -m baton.bench                        # Baton
    python -m baton.bench --baseline nixl        # and NIXL beside it, if it can be imported as nixl_cu12 or nixl
    python -m baton.bench --baseline nixl,mooncake   # and Mooncake's (mooncake-transfer-engine-non-cuda), over tcp
    python -m baton.bench --baseline kv_bw       # and `baton kv_bw`, the same in C++ (--baton names the program)
    python -m baton.bench --require tcp --json rows.json

Each row is the median of its rounds, with the best beside it. The libraries take turns, round by round, so that all
see the same machine; `memcpy` is a copy of the same pages within this process, in the same turns, and what a transfer
on one machine cannot beat by much. The ratio is the median of (its time / Baton's) of the turns: above 1, Baton is
quicker. GB/s are 10^9 bytes per second. The bytes are checked once before anything is timed.
"""
import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, List

import numpy

SHAPES = "4096x16384,32768x1024"  # pages, bytes of each


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

    def make(self, op: str, rows: numpy.ndarray, mine: numpy.ndarray, metadata: bytes, their_rows: numpy.ndarray,
             theirs: numpy.ndarray) -> Any:
        """A transfer of mine[i] and theirs[i]."""
        peer = self.agent.add_remote(metadata)
        local, remote = self.agent.prepare(rows), self.agent.prepare(their_rows, peer)
        self.route = self.agent.explain(peer)
        return self.agent.transfer(0 if op == "write" else 1, local, mine, remote, theirs)

    @staticmethod
    def run(transfer: Any) -> None:
        """From post to done."""
        transfer.post().wait()


class NixlSide:
    """The same over NIXL."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        api = nixl_api()
        self.memory = numpy.zeros(arguments.bytes, dtype=numpy.uint8)
        self.agent = api.nixl_agent(name, api.nixl_agent_config())
        self.agent.register_memory([(self.memory.ctypes.data, self.memory.nbytes, 0, "")], "DRAM")
        self.metadata = self.agent.get_agent_metadata()

    def make(self, op: str, rows: numpy.ndarray, mine: numpy.ndarray, metadata: bytes, their_rows: numpy.ndarray,
             theirs: numpy.ndarray) -> Any:
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

    def make(self, op: str, rows: numpy.ndarray, mine: numpy.ndarray, metadata: bytes, their_rows: numpy.ndarray,
             theirs: numpy.ndarray) -> Any:
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


class Memcpy:
    """The floor: the pages of one side, in the other's order, within one process."""

    name, route = "memcpy", ""

    def __init__(self, size: int) -> None:
        self.source, self.target = pattern(size), numpy.zeros(size, dtype=numpy.uint8)

    def make(self, pages: int, page: int) -> Any:
        """What run() takes."""
        order = numpy.random.default_rng(7).permutation(pages)
        return [memory[:pages * page].reshape(pages, page) for memory in (self.source, self.target)] + [order]

    @staticmethod
    def run(what: Any) -> None:
        """One copy, page by page: numpy's take() is a memcpy() for each."""
        source, into, order = what
        numpy.take(source, order, axis=0, out=into, mode="clip")


class KvBw:
    """`baton kv_bw`: both its sides, for some transfers at a time. Its median of them is a round."""

    name, at_once = "kv_bw", 7

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.program, self.provider = arguments.baton, arguments.require or "shm"
        self.route = self.provider

    def turn(self, op: str, pages: int, page: int) -> float:
        """Seconds of a transfer."""
        with tempfile.NamedTemporaryFile() as out:
            command = [self.program, "kv_bw", "--provider", self.provider, "--op", op, "--pages", str(pages),
                       "--page-bytes", str(page), "--iters", str(self.at_once), "--no-pin", "--json", out.name]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            if ran.returncode != 0:
                raise SystemExit(f"{' '.join(command)}: {ran.stderr}")
            return json.loads(out.read())["latency_us"]["p50"] / 1e6


SIDES = {"baton": BatonSide, "nixl": NixlSide, "mooncake": MooncakeSide}


def rows_of(address: int, pages: int, page: int) -> numpy.ndarray:
    """Every page: (address, bytes, device)."""
    rows = numpy.zeros((pages, 3), dtype=numpy.uint64)
    rows[:, 0] = numpy.uint64(address) + numpy.arange(pages, dtype=numpy.uint64) * numpy.uint64(page)
    rows[:, 1] = page
    return rows


def pattern(size: int) -> numpy.ndarray:
    """What a target's memory is full of: 64 times 0, 64 times 1, up to 250, and again."""
    return numpy.resize(numpy.repeat(numpy.arange(251, dtype=numpy.uint8), 64), size)


def target(arguments: argparse.Namespace) -> None:
    """The other process: memory for others, until standard input ends. It looks for messages as an engine does."""
    side = SIDES[arguments.target]("bench-target", arguments)
    side.memory[:] = pattern(arguments.bytes)
    print("target", side.metadata.hex(), side.memory.ctypes.data, flush=True)
    sys.stdin.read()
    os._exit(0)  # NIXL's own libraries may fail at exit


class Pair:
    """One library: this process and a target."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name = name
        arguments.bytes = max(pages * page for pages, page in arguments.shapes)
        self.side = SIDES[name]("bench", arguments)
        self.memory = self.side.memory
        command = [sys.executable, "-m", "baton.bench", "--target", name, "--bytes", str(arguments.bytes), "--require",
                   arguments.require, "--memory", arguments.memory]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        words: List[bytes] = next((line for line in self.child.stdout if line.startswith(b"target ")), b"").split()
        if not words:
            raise SystemExit(f"the target of {name} did not start")
        self.metadata, self.address = bytes.fromhex(words[1].decode()), int(words[2])

    def make(self, op: str, pages: int, page: int) -> Any:
        """A transfer of all pages in an order of its own on either side; checked once."""
        random = numpy.random.default_rng(7)
        mine, theirs = random.permutation(pages), random.permutation(pages)
        rows, their_rows = rows_of(self.memory.ctypes.data, pages, page), rows_of(self.address, pages, page)
        arguments = (rows, mine, self.metadata, their_rows, theirs)
        expected = pattern(pages * page).reshape(pages, page)
        if op == "read":
            transfer = self.side.make(op, *arguments)
            self.memory[:] = 255
            self.side.run(transfer)
        else:  # what was read goes back to where it was, and is read again elsewhere
            self.side.run(self.side.make("read", *arguments))
            transfer = self.side.make(op, *arguments)
            self.side.run(transfer)
            self.memory[:] = 255
            self.side.run(self.side.make("read", *arguments))
        seen = self.memory[:pages * page].reshape(pages, page)[mine]
        if not (seen == expected[theirs]).all():
            raise SystemExit(f"{self.name}: wrong bytes")
        return transfer

    def close(self) -> None:
        """Ends the target."""
        self.child.stdin.close()
        self.child.wait()


def timed(run: Any, transfer: Any) -> float:
    """Seconds of it."""
    begin = time.perf_counter()
    run(transfer)
    return time.perf_counter() - begin


def row_of(one: Any, route: str, op: str, pages: int, page: int, seen: List[float], ours: List[float]) -> Dict[str, Any]:
    """What is printed."""
    median = statistics.median(seen)
    return {"library": one.name, "op": op, "pages": pages, "page_bytes": page, "median_s": median, "best_s": min(seen),
            "gb_per_s": pages * page / median / 1e9, "rounds": len(seen), "route": route,
            "ratio": statistics.median(theirs / mine for theirs, mine in zip(seen, ours))}


def measure(pairs: List[Pair], floor: Memcpy, rounds: int, op: str, pages: int, page: int) -> List[Dict[str, Any]]:
    """A row for each library, and the floor's."""
    runs = [(pair, pair.side.run, pair.make(op, pages, page)) for pair in pairs]
    runs.append((floor, floor.run, floor.make(pages, page)))
    times: List[List[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for (_, run, transfer), seen in zip(runs, times):
            seen.append(timed(run, transfer))
    return [row_of(one, getattr(getattr(one, "side", one), "route", ""), op, pages, page, seen, times[0])
            for (one, _, _), seen in zip(runs, times)]


def beside_kv_bw(pair: Pair, other: KvBw, rounds: int, op: str, pages: int, page: int) -> Dict[str, Any]:
    """Its row: a few of our transfers, a few of its, in turns."""
    transfer = pair.make(op, pages, page)
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(statistics.median(timed(pair.side.run, transfer) for _ in range(other.at_once)))
        theirs.append(other.turn(op, pages, page))
    return row_of(other, other.route, op, pages, page, theirs, ours)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m baton.bench", description=__doc__.split("\n\n")[0])
    parser.add_argument("--baseline", default="", help="nixl, mooncake, kv_bw, several by commas: beside Baton")
    parser.add_argument("--baton", default="baton", help="the program whose kv_bw is measured")
    parser.add_argument("--require", default="", help="Baton takes this provider and no other")
    parser.add_argument("--memory", choices=("agent", "own"), default="agent", help="Baton's pages lie in memory of its "
                        "agent's (Agent.allocate()), or in ordinary memory as the others' do")
    parser.add_argument("--shapes", default=SHAPES, help="PAGESxBYTES, several by commas")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", default="", help="a file for the rows, one JSON object in a line")
    parser.add_argument("--target", default="", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.target:
        return target(arguments)
    try:
        arguments.shapes = [(int(pages), int(page)) for pages, page in
                            (shape.split("x") for shape in arguments.shapes.split(","))]
    except ValueError:
        parser.error(f"--shapes {arguments.shapes}: expected {SHAPES}")
    names = ["baton"] + [name for name in arguments.baseline.split(",") if name]
    other = KvBw(arguments) if "kv_bw" in names else None
    if other and shutil.which(arguments.baton) is None:
        parser.error(f"no program {arguments.baton}: ./run build makes build/release/baton, and --baton names it")
    names = [name for name in names if name != "kv_bw"]
    for name in names:
        if name not in SIDES:
            parser.error(f"no baseline {name}: there are nixl, mooncake and kv_bw")
    for name, there in (("nixl", nixl_api), ("mooncake", mooncake)):
        try:
            if name in names:
                there()
        except ImportError as why:
            parser.error(str(why))
    pairs = [Pair(name, arguments) for name in names]
    floor = Memcpy(arguments.bytes)
    rows = []
    print(f"{'library':8} {'op':6} {'pages':>7} {'bytes':>7} {'ms':>9} {'best':>9} {'GB/s':>7} {'ratio':>6}")
    for pages, page in arguments.shapes:
        for op in ("write", "read"):
            found = measure(pairs, floor, arguments.rounds, op, pages, page)
            if other:
                found.append(beside_kv_bw(pairs[0], other, arguments.rounds, op, pages, page))
            for row in found:
                print(f"{row['library']:8} {op:6} {pages:7} {page:7} {row['median_s'] * 1e3:9.3f} "
                      f"{row['best_s'] * 1e3:9.3f} {row['gb_per_s']:7.2f} {row['ratio']:6.2f}", flush=True)
            rows += found
    print(f"route: {rows[0]['route'].split(' [')[0]}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf8") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
    for pair in pairs:
        pair.close()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
