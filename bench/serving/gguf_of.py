"""Writes a Llama checkpoint of Hugging Face's as a GGUF file in bf16, which is what llama.cpp reads.

usage: gguf_of.py FOLDER FILE

For checkpoints with a byte-level BPE tokenizer that splits words as GPT-2 does, such as random_llama.py's. llama.cpp's own
converter knows tokenizers by a hash of what they make of a text, and refuses one that it has not heard of; this one reads
tokenizer.json. Needs the package gguf, of llama.cpp's authors, and numpy.
"""
import json
import pathlib
import sys

import gguf
import numpy

NAMES = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
         "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
OTHERS = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
          "lm_head.weight": "output.weight"}


def tensors_of(path):
    """(name, its bf16 numbers as 16 bits each)."""
    data = numpy.memmap(path, "u1", "r")
    length = int.from_bytes(data[:8].tobytes(), "little")
    for name, entry in json.loads(data[8:8 + length].tobytes()).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            sys.exit(f"gguf_of: {name} is {entry['dtype']}: only bf16 checkpoints are converted")
        begin, end = (8 + length + at for at in entry["data_offsets"])
        yield name, numpy.frombuffer(data[begin:end].tobytes(), "<u2").reshape(entry["shape"])


def name_of(name):
    if name in OTHERS:
        return OTHERS[name]
    layer, _, part = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
    return f"blk.{layer}.{NAMES[part]}.weight"


def in_pairs(weight, heads):
    """Rows in llama.cpp's order: it rotates neighbours, Hugging Face's models the two halves of a head."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def words_of(tokenizer, size):
    words = [f"[unused{i}]" for i in range(size)]
    kinds = [gguf.TokenType.UNUSED] * size
    for word, token in tokenizer["model"]["vocab"].items():
        words[token], kinds[token] = word, gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        words[added["id"]], kinds[added["id"]] = added["content"], gguf.TokenType.CONTROL
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    return words, kinds, merges


def convert(folder, path):
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads, head_dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    words, kinds, merges = words_of(json.loads((folder / "tokenizer.json").read_text()), config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    for name, bits in tensors_of(folder / "model.safetensors"):
        if bits.ndim == 1:  # norms are read as fp32
            writer.add_tensor(name_of(name), (bits.astype(numpy.uint32) << 16).view(numpy.float32))
            continue
        if ".q_proj." in name or ".k_proj." in name:
            bits = in_pairs(bits, heads if ".q_proj." in name else kv_heads)
        writer.add_tensor(name_of(name), numpy.ascontiguousarray(bits).view(numpy.uint8),
                          raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    convert(pathlib.Path(sys.argv[1]), sys.argv[2])
