"""`baton serve` as one half of a pair whose other half speaks baton.vllm's protocol, in processes of their own: KV goes
from one server to a peer with vLLM's layout, and from there to another server, which must then write what one server
alone does. pairing_test.py BATON"""
import os
import random
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "vllm"))
from pairing_peer import Peer, Server, checkpoint, packed  # noqa: E402
from proxy import Proxy, post  # noqa: E402

BINARY = sys.argv.pop(1)


def prompt(seed, tokens):
    dice = random.Random(seed)
    return [dice.randrange(260, 1000) for _ in range(tokens)]


def tokens_of(answer):
    return answer["choices"][0]["token_ids"]


def loaded(answer):
    """How many tokens' KV came, and why not more."""
    details = answer["usage"]["prompt_tokens_details"]
    return details["kv_loaded_tokens"], details.get("kv_load_error", "")


class Pairing(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.prefill, cls.decode = Server(BINARY, "prefill"), Server(BINARY, "decode")

    @classmethod
    def tearDownClass(cls):
        cls.prefill.close(), cls.decode.close()

    def peer(self, *arguments, **more):
        peer = Peer(*arguments, **more)
        self.addCleanup(peer.close)
        return peer

    def prefilled(self, asked):
        status, answer = self.prefill.ask(asked, 1, kv_transfer_params={"do_remote_decode": True})
        self.assertEqual(status, 200, answer)
        params = answer["kv_transfer_params"]
        self.assertEqual(sorted(params), ["do_remote_decode", "do_remote_prefill", "remote_address", "remote_agent",
                                          "remote_finished", "tp_size", "transfer_id"])
        self.assertEqual(params["tp_size"], 1)
        self.assertEqual((params["remote_agent"], params["remote_address"]), ("prefill", self.prefill.address))
        return params

    def decoded(self, asked, params):
        status, answer = self.decode.ask(asked, kv_transfer_params=params)
        self.assertEqual(status, 200, answer)
        # Alone: what prefill's server writes, whose cache never held what others have computed.
        self.assertEqual(tokens_of(answer), tokens_of(self.prefill.ask(asked)[1]))
        return loaded(answer)

    def until_free(self, server, others=0):
        while server.free_blocks() != 128 - others:
            pass

    def test_kv_passes_through_every_layout_and_the_answer_is_the_same(self):
        cases = [(128, "bfloat16", "amx"), (128, "float32", "vec"), (32, "bfloat16", "vec"), (48, "float32", "rows"),
                 (16, "bfloat16", "rows")]
        for seed, (size, dtype, kind) in enumerate(cases):
            with self.subTest(size=size, dtype=dtype, kind=kind):
                peer = self.peer(f"peer-{seed}", packed(size, dtype, kind))
                asked = prompt(seed, 150 + seed)
                blocks = peer.load(self.prefilled(asked), len(asked))
                self.assertIsNotNone(blocks)
                self.assertTrue(any(peer.cache[peer.at(0, blocks[0])]))
                self.assertEqual(self.decoded(asked, peer.offer(f"t{seed}", blocks)), (len(asked) // 16 * 16, ""))
                while peer.service.sends.finished() != {f"t{seed}"}:  # decode has said that it has them
                    pass
        self.until_free(self.prefill)

    def test_one_bit_that_is_another_is_found(self):
        peer = self.peer("flipped", packed(128, "bfloat16", "amx"))
        asked = prompt(11, 200)
        blocks = peer.load(self.prefilled(asked), len(asked))
        params = peer.offer("t", blocks)
        peer.cache[peer.at(2, blocks[1]).start + 77] ^= 4
        count, why = self.decoded(asked, params)
        self.assertEqual(count, 0)
        self.assertIn("block 1 of row 2 has a wrong checksum", why)

    def test_what_does_not_fit_is_refused_by_either_and_computed(self):
        kv = packed(128, "bfloat16", "amx")
        asked = prompt(12, 100)
        for name, about, why in (
                ("stranger", {"model": "another", "kv": kv}, "another model"),
                ("old", None, "does not name its model"),
                ("nameless", {"model": "", "kv": kv}, "--kv-identity the same name"),
                ("windows", {"model": checkpoint(), "kv": "it has windows"}, "cannot be converted: it has windows"),
                ("half", {"model": checkpoint(), "kv": dict(kv, dtype="float16")}, "of float16"),
                ("heads", {"model": checkpoint(), "kv": other_heads(kv)}, "3 of 32"),
                ("torn", {"model": checkpoint(), "kv": dict(kv, bytes=100)}, "not understood")):
            with self.subTest(name):
                peer = self.peer(name, kv, about=about)
                with self.assertLogs("baton.hand_off") as refused:
                    self.assertIsNone(peer.load(self.prefilled(asked), len(asked)))
                self.assertIn(why, refused.output[0])
                count, said = self.decoded(prompt(name, 100), peer.offer("t" + name, [1]))
                self.assertEqual(count, 0)
                self.assertIn(why, said)
        self.until_free(self.prefill)

    def test_a_peer_that_does_not_know_or_falls_silent_costs_its_work_alone(self):
        peer = self.peer("silent", packed(128, "bfloat16", "amx"))
        params = peer.offer("t", [1])
        count, why = self.decoded(prompt(13, 100), dict(params, transfer_id="never heard of"))
        self.assertEqual(count, 0)
        self.assertIn("no longer has it", why)
        params = self.peer("mute", packed(128, "bfloat16", "amx"), clock=time.monotonic).offer("t", [1])
        impatient = Server(BINARY, "impatient", "--load-silence", "1")  # so that this takes not longer
        self.addCleanup(impatient.close)
        status, answer = impatient.ask(prompt(14, 100), kv_transfer_params=params)
        self.assertEqual((status, loaded(answer)[0]), (200, 0), answer)
        self.assertIn("is silent for 1 s", loaded(answer)[1])
        self.assertEqual(tokens_of(answer), tokens_of(self.prefill.ask(prompt(14, 100))[1]))

    def test_two_servers_of_ours_are_a_pair_for_the_same_proxy(self):
        proxy = Proxy(self.prefill.url, self.decode.url, "", self.prefill.address)
        self.addCleanup(proxy.close)
        for seed, agent in enumerate(("", "prefill", "", "prefill")):
            proxy.agent = agent  # asked in turn, and at once
            asked = {"model": "m", "prompt": prompt(20 + seed, 130), "max_tokens": 12, "temperature": 0,
                     "ignore_eos": True, "return_token_ids": True}
            status, answer = post(proxy.url, asked)
            self.assertEqual(status, 200, answer)
            self.assertEqual(loaded(answer), (128, ""))
            self.assertEqual(tokens_of(answer), tokens_of(self.prefill.ask(asked["prompt"])[1]))
        self.until_free(self.prefill)
        self.until_free(self.decode)

    def test_what_is_asked_wrongly_is_said(self):
        for params, words in (({"do_remote_prefill": True}, "pass on what prefill answered"),
                              ({"do_remote_prefill": True, "transfer_id": "t", "remote_agent": "p",
                                "remote_address": "nowhere"}, "HOST:PORT"),
                              ({"remote_agent_": "p"}, "has no \"remote_agent_\""),
                              ({"do_remote_decode": 1}, "do_remote_decode"),
                              ({"do_remote_decode": True, "transfer_id": "x" * 300}, "at most 256 bytes"),
                              ({"do_remote_deocde": True}, "did you mean do_remote_decode?")):
            status, answer = self.decode.ask([300] * 50, kv_transfer_params=params)
            self.assertEqual(status, 400, answer)
            self.assertIn(words, answer["error"]["message"])
        status, answer = self.decode.ask([300] * 50, n=2, kv_transfer_params={"do_remote_decode": True})
        self.assertEqual(status, 400, answer)


def other_heads(kv):
    """The same bytes as of six heads of half the size."""
    halved = dict(kv, heads=6, head_size=16)
    for what, start in (("key", 0), ("value", 128 * 16)):
        halved[what] = {"start": start, "heads": [[6, 2 * 128 * 16]], "tokens": [[128, 16]], "elements": [[16, 1]]}
    return halved


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[1:])
