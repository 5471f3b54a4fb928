"""What two vLLM engines must have in common before KV goes from one to the other: the configuration and the weights."""
import hashlib
import json
import os
import pathlib
import sys
import tempfile
import types
import unittest

from baton.vllm.groups import Group
from baton.vllm.layout import levels
from baton.vllm.memory import Kind, KvMemory, Layer
from baton.vllm.service import identity_of
from baton.vllm.weights import checkpoint_of, weights_digest
from vllm_fakes import config


class Identity(unittest.TestCase):
    """What two engines must have in common besides the weights."""

    def test_the_configuration_counts_and_the_version_of_what_reads_it_does_not(self):
        def of(groups=(Group(16),), **more):
            one = config("x")
            one.model_config.hf_config = types.SimpleNamespace(to_json_string=lambda: json.dumps({"rope": 1, **more}))
            return identity_of(one, KvMemory([Layer(4096, 64, 64, 8, None)]), groups)

        self.assertEqual(of(transformers_version="5.1"), of(transformers_version="5.2"))
        self.assertNotEqual(of(rope=2), of())
        self.assertEqual(of([Group(16, layers=["a name"])]), of())
        self.assertEqual(of([Group(32)]), of())  # plans fit blocks into each other
        self.assertNotEqual(of([Group(16, 100)]), of())


class Weights(unittest.TestCase):
    """Which bytes tell one checkpoint from another."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.config = config("x")
        self.config.model_config.model = folder.name

    def test_every_byte_and_every_file_counts(self):
        first, second = self.folder / "model-1.safetensors", self.folder / "model-2.safetensors"
        first.write_bytes(bytes(100))
        seen = {weights_digest(self.config)}
        for at in range(100):
            first.write_bytes(bytes(at) + b"\1" + bytes(99 - at))
            seen.add(weights_digest(self.config))
        first.write_bytes(bytes(100))
        second.write_bytes(b"")
        seen.add(weights_digest(self.config))
        self.assertEqual(len(seen), 102)
        (self.folder / "training.bin").write_bytes(b"is not read where there are safetensors")
        self.assertIn(weights_digest(self.config), seen)

    def test_a_copy_and_a_cache_of_the_hub_are_one_checkpoint(self):
        whole = self.folder / "whole"
        hub = self.folder / "snapshot"
        (self.folder / "blobs").mkdir()
        for one in (whole, hub):
            one.mkdir()
        (whole / "model.safetensors").write_bytes(b"weights")
        blob = self.folder / "blobs" / hashlib.sha256(b"weights").hexdigest()
        blob.write_bytes(b"not read")
        os.symlink(blob, hub / "model.safetensors")
        self.config.model_config.model = str(whole)
        said = weights_digest(self.config)
        self.config.model_config.model = str(hub)
        self.assertEqual(weights_digest(self.config), said)

    def test_weights_that_are_nowhere_are_an_error_that_says_what_to_do(self):
        with self.assertRaisesRegex(ValueError, '"identity"'):
            weights_digest(self.config)
        self.config.load_config.load_format = "dummy"
        self.assertEqual(weights_digest(self.config), "dummy")


class Layout(unittest.TestCase):
    """How the places of numbers in a block are said, and which checkpoint it is."""

    def test_places_are_counted_in_as_few_levels_as_there_are(self):
        self.assertEqual(levels([0]), [])
        self.assertEqual(levels(list(range(0, 640, 5))), [[128, 5]])
        tiles = [512 * group + 2 * row for group in range(8) for row in range(16)]
        self.assertEqual(levels(tiles), [[16, 2], [8, 512]])
        self.assertEqual(levels([100 * i + 7 * j + k for i in range(2) for j in range(3) for k in range(2)]),
                         [[2, 1], [3, 7], [2, 100]])
        for uneven in ([0, 1, 3], [0, 2, 1, 3, 5, 4], [0, 1, 2, 4]):
            with self.assertRaises(ValueError):
                levels(uneven)

    def test_what_plans_move_of_a_block(self):
        """Rows of a token; of kernels with tiles runs of 16 tokens and 16 elements, which K has side by side."""
        def kind(tokens, first=0, **more):
            half = {"heads": [[2, 64 * tokens]], "start": 0}
            return Kind({"block_tokens": tokens, "bytes": 256 * tokens, "dtype": "bfloat16", "heads": 2, "total_heads": 4,
                         "first_head": first, "head_size": 32, "key": {**half, **more["key"]},
                         "value": {**half, "start": 32 * tokens, **more["value"]}})

        def tiled(tokens, first=0):
            return kind(tokens, first, key={"tokens": [[16, 2], [tokens // 16, 512]], "elements": [[2, 1], [16, 32]]},
                        value={"tokens": [[2, 1], [tokens // 2, 32]], "elements": [[16, 2], [2, 16 * tokens]]})

        def rows(tokens):
            return kind(tokens, key={"tokens": [[tokens, 1]], "elements": [[32, tokens]]},
                        value={"tokens": [[tokens, 32]], "elements": [[32, 1]]})

        self.assertEqual(rows(64).rows, {"key": (0, (1, 64, 2, 32), (64, 2, 8192, 128)),
                                         "value": (4096, (1, 64, 2, 32), (64, 64, 8192, 2))})
        self.assertEqual(tiled(64).rows, {"key": (0, (2, 4, 2, 256), (512, 1024, 8192, 2)),
                                          "value": (4096, (2, 4, 2, 256), (2048, 512, 8192, 2))})
        self.assertIsNone(tiled(64).cut_for(tiled(64)))
        self.assertEqual(tiled(64).cut_for(tiled(96)), (32, slice(0, 2)))
        self.assertEqual(tiled(64).cut_for(tiled(64, first=1)), (64, slice(1, 2)))
        self.assertIsNone(tiled(64).cut_for(rows(64)))  # which plans refuse
        self.assertNotEqual(tiled(64).format, rows(64).format)
        with self.assertRaises(ValueError):
            kind(64, key={"tokens": [[2, 1], [2, 4], [16, 32]], "elements": [[2, 2], [4, 16], [4, 128]]},
                 value={"tokens": [[64, 32]], "elements": [[32, 1]]})

    def test_a_checkpoint_is_its_weights_and_its_configuration(self):
        with tempfile.TemporaryDirectory() as folder:
            one = config("x")
            one.model_config.model = folder
            weights, said = pathlib.Path(folder, "model.safetensors"), pathlib.Path(folder, "config.json")
            weights.write_bytes(b"weights")
            self.assertEqual(checkpoint_of(one, weights_digest(one)), "")  # it cannot be told
            said.write_text("{}")
            seen = {checkpoint_of(one, weights_digest(one))}
            said.write_text("{ }")
            seen.add(checkpoint_of(one, weights_digest(one)))
            weights.write_bytes(b"others")
            seen.add(checkpoint_of(one, weights_digest(one)))
            self.assertEqual(len(seen - {""}), 3)
            self.assertEqual(checkpoint_of(one, "dummy"), "")
            one.model_config.hf_overrides = {"rope_theta": 1}
            self.assertEqual(checkpoint_of(one, weights_digest(one)), "")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[1:])
