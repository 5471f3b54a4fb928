"""The benchmark: its rows are there and add up, over two routes; wrong words are refused. It checks its bytes itself."""
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest

import numpy

assert numpy.__version__


def bench(*words):
    return subprocess.run([sys.executable, "-m", "baton.bench", *words], capture_output=True, text=True, check=False)


def children(process):
    with open(f"/proc/{process}/task/{process}/children", encoding="utf8") as found:
        return [int(child) for child in found.read().split()]


def state(process):
    """T: stopped; Z, X: ended."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf8") as found:
            return found.read().rsplit(") ", 1)[1][0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


class Bench(unittest.TestCase):
    def test_rows(self):
        for provider in ("shm", "tcp"):
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "rows.json")
                ran = bench("--rounds", "1", "--shapes", "64x4096,100x64", "--require", provider, "--json", path,
                            "--memory", "agent" if provider == "shm" else "own")
                self.assertEqual(ran.returncode, 0, ran.stderr)
                with open(path, encoding="utf8") as rows:
                    found = [json.loads(row) for row in rows]
            self.assertEqual([(row["library"], row["op"], row["pages"]) for row in found],
                             [(library, op, pages) for pages in (64, 100) for op in ("write", "read")
                              for library in ("baton", "memcpy")])
            for row in found:
                self.assertAlmostEqual(row["gb_per_s"] * row["median_s"] * 1e9, row["pages"] * row["page_bytes"], 0)
                self.assertLessEqual(row["best_s"], row["median_s"])
                if row["library"] == "baton":
                    self.assertIn(provider, row["route"])
                    self.assertEqual(row["ratio"], 1)

    def test_who_is_stopped_dies_with_the_command(self):
        words = [sys.executable, "-m", "baton.bench", "--rounds", "1000000", "--shapes", "8x4096", "--require", "tcp"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as ran:
            ran.stdout.readline()  # the head of the table: all children are there
            initiators = children(ran.pid)
            family = initiators + [target for initiator in initiators for target in children(initiator)]
            self.assertEqual(len(family), 2)
            while not any(state(child) == "T" for child in family):
                os.sched_yield()
            ran.kill()
        while any(state(child) not in "XZ" for child in family):
            os.sched_yield()

    def test_refusals(self):
        self.assertIn("no baseline mpi", bench("--baseline", "mpi").stderr)
        self.assertIn("--shapes 7", bench("--shapes", "7").stderr)
        self.assertIn("carrier", bench("--require", "carrier").stderr)
        ran = bench("--baseline", "nixl")  # only the drop-in is there by that name
        self.assertIn("NIXL is not installed here", ran.stderr)
        if importlib.util.find_spec("mooncake") is None:
            self.assertIn("Mooncake is not installed here", bench("--baseline", "mooncake").stderr)


if __name__ == "__main__":
    unittest.main()
