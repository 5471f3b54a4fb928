"""Scattered pages between two processes of this machine, as an engine moves its KV cache: prepared and posted by
Python, from post to done.

    python -m baton.bench                        # Baton
    python -m baton.bench --baseline nixl        # and NIXL beside it, if it can be imported as nixl_cu12 or nixl
    python -m baton.bench --baseline nixl,mooncake   # and Mooncake's (mooncake-transfer-engine-non-cuda), over tcp
    python -m baton.bench --require tcp --json rows.json
    python -m baton.bench --poll --baseline nixl   # both of Baton's processes poll all the time, as NIXL's initiator does

Each row is the median of its rounds, with the best beside it. The libraries take turns, round by round, so that all
see the same machine, and each has two processes of its own, which are stopped while it is another's turn: a library
that polls takes no time from the others. `memcpy` is a copy of the same pages within this process, in the same turns,
and what a transfer on one machine cannot beat by much. The ratio is the median of (its time / Baton's) of the turns:
above 1, Baton is quicker. GB/s are 10^9 bytes per second. The bytes are checked once before anything is timed.
"""
from __future__ import annotations

import argparse
import ctypes
import difflib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Dict, List

import numpy

from .bench_sides import SIDES, mooncake, nixl_api

if TYPE_CHECKING:
    from .bench_sides import Array

SHAPES = "4096x16384,32768x1024"  # pages, bytes of each


class Memcpy:
    """The floor: the pages of one side, in the other's order, within one process."""

    name, route = "memcpy", ""

    def __init__(self, size: int) -> None:
        self.source, self.target = pattern(size), numpy.zeros(size, dtype=numpy.uint8)

    def make(self, _op: str, pages: int, page: int) -> None:
        """The memory that turn() copies."""
        order = numpy.random.default_rng(7).permutation(pages)
        self.what = [memory[:pages * page].reshape(pages, page) for memory in (self.source, self.target)] + [order]

    def turn(self) -> float:
        """Seconds of one copy, page by page: numpy's take() is a memcpy() for each."""
        source, into, order = self.what
        begin = time.perf_counter()
        numpy.take(source, order, axis=0, out=into, mode="clip")
        return time.perf_counter() - begin


def rows_of(address: int, pages: int, page: int) -> Array:
    """Every page: (address, bytes, device)."""
    rows = numpy.zeros((pages, 3), dtype=numpy.uint64)
    rows[:, 0] = numpy.uint64(address) + numpy.arange(pages, dtype=numpy.uint64) * numpy.uint64(page)
    rows[:, 1] = page
    return rows


def pattern(size: int) -> Array:
    """The pattern in a target's memory: 64 times 0, 64 times 1, up to 250, and again."""
    return numpy.resize(numpy.repeat(numpy.arange(251, dtype=numpy.uint8), 64), size)


def die_with_parent() -> None:
    """Kills this process when its parent dies: a stopped child does not see the end of its standard input."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def target(arguments: argparse.Namespace) -> None:
    """The other process: memory for others, until standard input ends. It looks for messages as an engine does."""
    die_with_parent()
    side = SIDES[arguments.target]("bench-target", arguments)
    side.memory[:] = pattern(arguments.bytes)
    print("target", side.metadata.hex() or "-", side.memory.ctypes.data, flush=True)
    if arguments.poll and hasattr(side, "look"):
        while not select.select([sys.stdin], [], [], 0)[0]:
            side.look()
    sys.stdin.read()
    os._exit(0)  # NIXL's own libraries may fail at exit


def child(what: str, name: str, arguments: argparse.Namespace) -> Any:
    """This program again, as `what` of a library."""
    command = [sys.executable, "-m", "baton.bench", what, name, "--bytes", str(arguments.bytes), "--require",
               arguments.require, "--memory", arguments.memory]
    command += ["--poll"] if arguments.poll else []
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def answer(of: Any, word: str, name: str) -> List[bytes]:
    """The rest of a child's next line that begins with `word`; other lines are output of libraries."""
    words: List[bytes] = next((line for line in of.stdout if line.startswith(word.encode() + b" ")), b"").split()
    if not words:
        raise SystemExit(f"the {word} of {name} did not start, or failed")
    return words[1:]


def initiator(arguments: argparse.Namespace) -> None:
    """The process of a library that posts: does what standard input says, line by line."""
    die_with_parent()
    pair = Pair(arguments.initiator, arguments)
    print("initiator", pair.child.pid, flush=True)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "make":
            transfer = pair.make(words[1], int(words[2]), int(words[3]))
            print("initiator made", getattr(pair.side, "route", ""), flush=True)
        else:
            print("initiator", timed(pair.side.run, transfer), flush=True)
    pair.close()
    sys.stdout.flush()
    os._exit(0)


class Library:
    """One library: two processes, which run while it is their turn."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name, self.route = name, ""
        self.child = child("--initiator", name, arguments)
        self.processes = [self.child.pid, int(answer(self.child, "initiator", name)[0])]
        self.signal(signal.SIGSTOP)

    def signal(self, number: int) -> None:
        """To both."""
        for process in self.processes:
            os.kill(process, number)

    def ask(self, line: str) -> List[bytes]:
        """Lets it run for one answer."""
        self.signal(signal.SIGCONT)
        self.child.stdin.write(line.encode() + b"\n")
        self.child.stdin.flush()
        said = answer(self.child, "initiator", self.name)
        self.signal(signal.SIGSTOP)
        return said

    def make(self, op: str, pages: int, page: int) -> None:
        """What turn() runs."""
        self.route = b" ".join(self.ask(f"make {op} {pages} {page}")[1:]).decode()

    def turn(self) -> float:
        """Seconds of the transfer."""
        return float(self.ask("run")[0])

    def close(self) -> None:
        """Ends both."""
        self.signal(signal.SIGCONT)
        self.child.stdin.close()
        self.child.wait()


class Pair:
    """One library, in the process that posts: its side, and a target."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name = name
        self.side = SIDES[name]("bench", arguments)
        self.memory = self.side.memory
        self.child = child("--target", name, arguments)
        words = answer(self.child, "target", name)
        self.metadata, self.address = bytes.fromhex(words[0].decode().strip("-")), int(words[1])

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
        """Ends the target process."""
        self.child.stdin.close()
        self.child.wait()


def timed(run: Any, transfer: Any) -> float:
    """Its seconds."""
    begin = time.perf_counter()
    run(transfer)
    return time.perf_counter() - begin


def row_of(one: Any, op: str, pages: int, page: int, seen: List[float], ours: List[float]) -> Dict[str, Any]:
    """One row of the printed report."""
    median = statistics.median(seen)
    return {"library": one.name, "op": op, "pages": pages, "page_bytes": page, "median_s": median, "best_s": min(seen),
            "gb_per_s": pages * page / median / 1e9, "rounds": len(seen), "route": one.route,
            "ratio": statistics.median(theirs / mine for theirs, mine in zip(seen, ours))}


def measure(those: List[Any], rounds: int, op: str, pages: int, page: int) -> List[Dict[str, Any]]:
    """A row for each; the first is ours."""
    for one in those:
        one.make(op, pages, page)
    times: List[List[float]] = [[] for _ in those]
    for _ in range(rounds):
        for one, seen in zip(those, times):
            seen.append(one.turn())
    return [row_of(one, op, pages, page, seen, times[0]) for one, seen in zip(those, times)]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m baton.bench", description=__doc__.split("\n\n")[0])
    parser.add_argument("--baseline", default="", help="nixl, mooncake, or both by a comma: beside Baton")
    parser.add_argument("--require", default="", help="Baton takes this provider and no other")
    parser.add_argument("--memory", choices=("agent", "own"), default="agent", help="Baton's pages lie in memory of its "
                        "agent's (Agent.allocate()), or in ordinary memory as the others' do")
    parser.add_argument("--poll", action="store_true", help="no process sleeps: those that post ask for the state again "
                        "and again, and the targets for messages, as NIXL's own benchmark does")
    parser.add_argument("--shapes", default=SHAPES, help="PAGESxBYTES, several by commas")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", default="", help="a file for the rows, one JSON object in a line")
    parser.add_argument("--target", default="", help=argparse.SUPPRESS)
    parser.add_argument("--initiator", default="", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.target:
        return target(arguments)
    if arguments.initiator:
        return initiator(arguments)
    try:
        arguments.shapes = [(int(pages), int(page)) for pages, page in
                            (shape.split("x") for shape in arguments.shapes.split(","))]
    except ValueError:
        parser.error(f"--shapes {arguments.shapes}: expected {SHAPES}")
    if arguments.rounds < 1 or min(min(shape) for shape in arguments.shapes) < 1:
        parser.error("--rounds, and pages and bytes of --shapes, are at least 1")
    if arguments.json and not os.access(os.path.dirname(arguments.json) or ".", os.W_OK):
        parser.error(f"cannot write {arguments.json}: name a file that can be written")
    names = ["baton"] + [name for name in arguments.baseline.split(",") if name]
    for name in names:
        if name not in SIDES:
            near = difflib.get_close_matches(name, ("nixl", "mooncake"), 1)
            hint = f"did you mean {near[0]}?" if near else "there are nixl and mooncake"
            parser.error(f"no baseline {name}: {hint}")
    for name, there in (("nixl", nixl_api), ("mooncake", mooncake)):
        try:
            if name in names:
                there()
        except ImportError as why:
            parser.error(str(why))
    arguments.bytes = max(pages * page for pages, page in arguments.shapes)
    libraries = [Library(name, arguments) for name in names]
    those = libraries + [Memcpy(arguments.bytes)]
    rows = []
    print(f"{'library':8} {'op':6} {'pages':>7} {'bytes':>7} {'ms':>9} {'best':>9} {'GB/s':>7} {'ratio':>6}", flush=True)
    for pages, page in arguments.shapes:
        for op in ("write", "read"):
            found = measure(those, arguments.rounds, op, pages, page)
            for row in found:
                print(f"{row['library']:8} {op:6} {pages:7} {page:7} {row['median_s'] * 1e3:9.3f} "
                      f"{row['best_s'] * 1e3:9.3f} {row['gb_per_s']:7.2f} {row['ratio']:6.2f}", flush=True)
            rows += found
    print(f"route: {rows[0]['route'].split(' [')[0]}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf8") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
    for library in libraries:
        library.close()


if __name__ == "__main__":
    main()
