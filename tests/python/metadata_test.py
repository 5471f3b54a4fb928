"""Metadata in a store, from Python and by NIXL's calls."""
import os
import shutil
import subprocess
import tempfile
import unittest
import urllib.request

import numpy

import baton
from baton.nixl._api import nixl_agent, nixl_agent_config
from helpers import until
from ports import free_ports


def raises(kind, call):
    """Whether it raises that, and nothing else."""
    try:
        call()
    except baton.BatonError as why:
        return isinstance(why, kind)
    return False


class Store(unittest.TestCase):
    def test_by_name(self):
        with tempfile.TemporaryDirectory() as folder:
            store = {"metadata_store": f"file://{folder}"}
            with baton.Agent("alpha", **store) as a, baton.Agent("beta", **store) as b:
                a.follow_metadata("beta")
                until(lambda: raises(baton.NotFoundError, lambda: a.metadata_state("beta")))
                memory = b.allocate(4096)
                b.publish_metadata()
                until(lambda: a.has_remote("beta", [memory]))
                b.metadata_state()
                with baton.Agent("beta", **store) as second:
                    second.publish_metadata()
                    until(lambda: raises(baton.NotAllowedError, second.metadata_state))
                b.withdraw_metadata()
                until(lambda: not a.has_remote("beta"))
            self.assertEqual([name for name in os.listdir(folder) if name.endswith(".agent")], [])
        with self.assertRaisesRegex(baton.InvalidParamError, "etcd://"):
            baton.Agent("alpha", metadata_store="pigeon://loft")
        with baton.Agent("alpha") as alone, self.assertRaisesRegex(baton.NotAllowedError, "metadata_store"):
            alone.publish_metadata()


class ByEtcd(unittest.TestCase):
    """NIXL's way: NIXL_ETCD_ENDPOINTS, and calls without an address."""

    def setUp(self):
        if shutil.which("etcd") is None:
            self.skipTest("no etcd here (Debian: etcd-server)")
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        while True:
            port = free_ports(2)
            client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"
            server = subprocess.Popen(
                ["etcd", "--data-dir", self.folder.name, "--listen-client-urls", client, "--advertise-client-urls",
                 client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster",
                 "default=" + peer], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            self.addCleanup(server.wait)
            self.addCleanup(server.kill)
            until(lambda: server.poll() is not None or self.healthy(client))
            if server.poll() is None:
                break  # else somebody took its ports
        os.environ["NIXL_ETCD_ENDPOINTS"] = client
        self.addCleanup(os.environ.pop, "NIXL_ETCD_ENDPOINTS")

    @staticmethod
    def healthy(client):
        try:
            with urllib.request.urlopen(client + "/health", timeout=1) as reply:
                return b"true" in reply.read()
        except OSError:
            return False

    def test_nixls_calls(self):
        a, b = nixl_agent("a", nixl_agent_config()), nixl_agent("b", nixl_agent_config())
        memory, later = numpy.zeros(4096, numpy.uint8), numpy.zeros(4096, numpy.uint8)
        b.register_memory([(memory.ctypes.data, 4096, 0, "")], "DRAM")
        self.assertFalse(a.check_remote_metadata("b"))
        b.send_local_metadata()
        a.fetch_remote_metadata("b")
        whole = a.get_xfer_descs([(memory.ctypes.data, 4096, 0)], "DRAM")
        until(lambda: a.check_remote_metadata("b", whole))
        registered = b.register_memory([(later.ctypes.data, 4096, 0, "")], "DRAM")
        b.send_partial_agent_metadata(registered, True, label="later")
        a.fetch_remote_metadata("b", label="later")
        part = a.get_xfer_descs([(later.ctypes.data, 4096, 0)], "DRAM")
        until(lambda: a.check_remote_metadata("b", part))
        b.invalidate_local_metadata()
        until(lambda: not a.check_remote_metadata("b"))


if __name__ == "__main__":
    unittest.main()
