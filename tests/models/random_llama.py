"""Writes a Llama checkpoint with random weights in bf16, and a tokenizer of this repository: something to measure with.

usage: random_llama.py FOLDER [--hidden N] [--layers N] [--heads N] [--kv-heads N] [--intermediate N] [--positions N] [--seed N]

Without options it is as large as SmolLM-135M without its vocabulary: hidden 576, 30 layers, 107 million parameters. The same
options give the same bytes.
"""
import argparse
import json
import math
import pathlib
import random
import shutil
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "models/kjv-1.8m"
VOCABULARY, END = 1024, 256  # of that tokenizer
FILES = ("tokenizer.json", "tokenizer_config.json")


def config_of(arguments):
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_act": "silu",
            "hidden_size": arguments.hidden, "intermediate_size": arguments.intermediate,
            "num_hidden_layers": arguments.layers, "num_attention_heads": arguments.heads,
            "num_key_value_heads": arguments.kv_heads, "head_dim": arguments.hidden // arguments.heads,
            "vocab_size": VOCABULARY, "max_position_embeddings": arguments.positions, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "bos_token_id": END,
            "eos_token_id": END}


def shapes_of(config):
    d, f = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[heads] * config["head_dim"] for heads in ("num_attention_heads", "num_key_value_heads"))
    yield "model.embed_tokens.weight", (VOCABULARY, d)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (d,)
        for name, shape in (("q", (q, d)), ("k", (kv, d)), ("v", (kv, d)), ("o", (d, q))):
            yield f"{at}self_attn.{name}_proj.weight", shape
        yield at + "post_attention_layernorm.weight", (d,)
        for name, shape in (("gate", (f, d)), ("up", (f, d)), ("down", (d, f))):
            yield f"{at}mlp.{name}_proj.weight", shape
    yield "model.norm.weight", (d,)


# The upper byte of a number in bf16: of either sign, between 1/128 and 1/32 in size, whatever the lower byte is. That is about
# the spread, 0.02, that weights begin with.
UPPER = bytes(0x3c if i < 128 else 0xbc for i in range(256))
ONE = b"\x80\x3f"


def numbers(dice, count):
    both = bytearray(2 * count)
    both[0::2] = dice.randbytes(count)
    both[1::2] = dice.randbytes(count).translate(UPPER)
    return both


def write_weights(path, config, seed):
    """safetensors: the header's length, the header, and the numbers one after the other."""
    header, at, parameters = {"__metadata__": {"format": "pt"}}, 0, 0
    for name, shape in shapes_of(config):
        size = math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + 2 * size]}
        at, parameters = at + 2 * size, parameters + size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    dice = random.Random(seed)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, shape in shapes_of(config):
            count = math.prod(shape)
            file.write(ONE * count if len(shape) == 1 else numbers(dice, count))  # norms are all 1
    return parameters


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--positions", type=int, default=2048, help="longest context")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.hidden % arguments.heads or arguments.heads % arguments.kv_heads:
        parser.error("--hidden is a multiple of --heads, and that one of --kv-heads")
    config = config_of(arguments)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    parameters = write_weights(arguments.folder / "model.safetensors", config, arguments.seed)
    for name in FILES:
        shutil.copyfile(TOKENIZER / name, arguments.folder / name)
    # Written last: who finds it finds the rest.
    (arguments.folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    print(f"{arguments.folder}: {parameters:,} parameters")


if __name__ == "__main__":
    sys.exit(main())
