"""Logits of the engine beside those of transformers, for random-weight models of every family."""
import subprocess
import sys
import tempfile

import numpy as np
import torch
import transformers as hf
from transformers.masking_utils import eager_mask

hf.logging.set_verbosity_error()
hf.logging.disable_progress_bar()

TOKENS = 150
# Of the largest logit. K and V are kept in bf16 here, so they are rounded there, too: what rounding
# changes would else choose another expert where two are nearly equal, and logits would be far apart.
TOLERANCE = 0.002

SMALL = dict(vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
             bos_token_id=1, eos_token_id=2)


def rope(kind, **more):
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=10000.0, **more))


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
EXPERTS = dict(num_experts=16, num_experts_per_tok=4, moe_intermediate_size=48)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
# name: (class, config, dtype of the file)
MODELS = {
    "llama2": (hf.LlamaConfig, {}, torch.float16),
    "llama2 with biases": (hf.LlamaConfig, dict(attention_bias=True, mlp_bias=True), torch.float32),
    "llama3.2, tied": (hf.LlamaConfig, dict(tie_word_embeddings=True, **LLAMA3), torch.bfloat16),
    "tinyllama": (hf.LlamaConfig, dict(num_key_value_heads=1), torch.bfloat16),
    "smollm2, tied": (hf.LlamaConfig, dict(tie_word_embeddings=True, hidden_size=96,
                                           num_attention_heads=6, num_key_value_heads=3),
                      torch.bfloat16),
    "llama, linear rope": (hf.LlamaConfig, rope("linear", factor=4.0), torch.bfloat16),
    "llama, dynamic rope": (hf.LlamaConfig, rope("dynamic", factor=4.0), torch.bfloat16),
    "mistral 0.1, window": (hf.MistralConfig, dict(sliding_window=40), torch.bfloat16),
    "mistral 0.3": (hf.MistralConfig, dict(sliding_window=None, head_dim=32), torch.bfloat16),
    "qwen2.5, tied": (hf.Qwen2Config, dict(tie_word_embeddings=True), torch.bfloat16),
    "qwen2.5, yarn": (hf.Qwen2Config, YARN, torch.bfloat16),
    "qwen2, window": (hf.Qwen2Config, dict(use_sliding_window=True, sliding_window=24,
                                           max_window_layers=1), torch.float16),
    "qwen3, tied": (hf.Qwen3Config, dict(tie_word_embeddings=True, head_dim=32), torch.bfloat16),
    "qwen3, biases, yarn": (hf.Qwen3Config, dict(head_dim=48, attention_bias=True, **YARN),
                            torch.bfloat16),
    "qwen3 moe": (hf.Qwen3MoeConfig, dict(head_dim=32, norm_topk_prob=True, **EXPERTS), torch.bfloat16),
    "qwen3 moe, weights as they are": (hf.Qwen3MoeConfig, dict(norm_topk_prob=False, **EXPERTS),
                                       torch.float32),
    "qwen3 moe, some layers dense": (hf.Qwen3MoeConfig, dict(
        num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[3], attention_bias=True,
        norm_topk_prob=True, tie_word_embeddings=True, **EXPERTS), torch.bfloat16),
    "qwen3 moe, window, yarn": (hf.Qwen3MoeConfig, dict(
        use_sliding_window=True, sliding_window=24, num_experts=20, num_experts_per_tok=7,
        moe_intermediate_size=32, **YARN), torch.float16),
    "mixtral": (hf.MixtralConfig, dict(num_local_experts=8, num_experts_per_tok=2), torch.bfloat16),
    "mixtral, window": (hf.MixtralConfig, dict(num_local_experts=4, num_experts_per_tok=1, head_dim=32,
                                               sliding_window=40), torch.bfloat16),
}


def attention_over_bf16(module, query, key, value, *args, **more):
    eager = sys.modules[type(module).__module__].eager_attention_forward
    key, value = (x.to(torch.bfloat16).to(x.dtype) for x in (key, value))
    return eager(module, query, key, value, *args, **more)


hf.AttentionInterface.register("over_bf16", attention_over_bf16)
hf.AttentionMaskInterface.register("over_bf16", eager_mask)


def make(config_class, changes, seed):
    """A model whose weights are bf16 numbers, so that no file rounds them."""
    torch.manual_seed(seed)
    config = config_class(**{**SMALL, **changes}, attn_implementation="over_bf16")
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.75, 1.25)
            elif name.endswith("bias"):
                weight.uniform_(-0.5, 0.5)
            else:
                weight.uniform_(-1.8, 1.8).div_(weight.shape[-1] ** 0.5)
            # A float16 has three bits more, but not the small numbers.
            weight.copy_(weight.to(torch.bfloat16).to(torch.float16).to(torch.bfloat16))
    return model


def engine_logits(probe, folder, tokens, chunk):
    done = subprocess.run([probe, "logits", folder, str(chunk)], text=True, capture_output=True,
                          input=" ".join(map(str, tokens)))
    if done.returncode != 0:
        raise SystemExit(f"engine_probe: {done.stderr}")
    return np.array([[float(x) for x in line.split()] for line in done.stdout.splitlines()])


def main(probe):
    failed = False
    for seed, (name, (config_class, changes, dtype)) in enumerate(MODELS.items()):
        model = make(config_class, changes, seed)
        tokens = torch.randint(3, SMALL["vocab_size"], (TOKENS,)).tolist()
        with torch.no_grad():
            expected = model(torch.tensor([tokens])).logits[0].numpy()
        with tempfile.TemporaryDirectory() as folder:
            model.to(dtype).save_pretrained(folder, max_shard_size="100KB")
            actual = engine_logits(probe, folder, tokens, 50)
        off = np.abs(actual - expected).max() / np.abs(expected).max()
        same = (actual.argmax(1) == expected.argmax(1)).mean()
        bad = not off < TOLERANCE
        failed |= bad
        print(f"{'WRONG' if bad else 'ok':6}{name:24} farthest logit {off:.5f} of the largest, "
              f"greedy token the same at {100 * same:.1f} % of {TOKENS} places")
    return 1 if failed else 0


sys.exit(main(sys.argv[1]))
