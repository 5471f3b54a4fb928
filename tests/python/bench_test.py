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
            self.assertEqual([(row["op"], row["pages"]) for row in found],
                             [("write", 64), ("read", 64), ("write", 100), ("read", 100)])
            for row in found:
                self.assertAlmostEqual(row["gb_per_s"] * row["median_s"] * 1e9, row["pages"] * row["page_bytes"], 0)
                self.assertIn(provider, row["route"])

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
