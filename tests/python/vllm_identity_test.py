"""What two vLLM engines must have in common before KV goes from one to the other: the configuration and the weights."""
import hashlib
import json
import os
import pathlib
import sys
import tempfile
import types
import unittest

from baton.hand_off import KvMemory, Layer
from baton.vllm.groups import Group
from baton.vllm.identity import checkpoint_of, identity_of, weights_digest
from vllm_fakes import config


class Identity(unittest.TestCase):
    """What two engines must have in common besides the weights."""

    def test_the_configuration_counts_and_the_version_of_what_reads_it_does_not(self):
        def of(groups=(Group(16),), **more):
            one = config("x")
            one.model_config.hf_config = types.SimpleNamespace(to_json_string=lambda: json.dumps({"rope": 1, **more}))
            return identity_of(one, KvMemory([Layer(4096, 64, 64, 8, {})]), groups)

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


class Checkpoint(unittest.TestCase):
    """Which one it is, in words of engines of other makes."""

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
