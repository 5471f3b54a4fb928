"""A model with random weights of which some layers attend to everything and some to a window, as Gemma 3 has them: vLLM
keeps their KV in groups of blocks. Its tokenizer is another model's.

usage: hybrid_model.py TOKENIZER FOLDER
"""
import json
import pathlib
import shutil
import sys

WINDOW = 200  # tokens: neither a block nor a prompt is so long


def write(tokenizer, folder, seed=1):
    import torch
    import transformers

    config = transformers.Gemma3TextConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, sliding_window=WINDOW, query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2, bos_token_id=256, eos_token_id=256,
        pad_token_id=0, tie_word_embeddings=True)
    torch.manual_seed(seed)
    model = transformers.Gemma3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():  # so that answers are of many tokens, and by what is far back
            if "embed" in name:
                weight.normal_(0, 0.02)
            elif weight.dim() > 1:
                weight.normal_(0, 1.5 * weight.shape[1] ** -0.5)
            elif "q_norm" in name or "k_norm" in name:
                weight.fill_(0.5)
    model.save_pretrained(folder)
    for file in pathlib.Path(tokenizer).glob("tokenizer*"):
        shutil.copy(file, folder)
    said = json.loads((pathlib.Path(folder) / "config.json").read_text())
    assert said["sliding_window"] == WINDOW and "Gemma3ForCausalLM" in said["architectures"], said


if __name__ == "__main__":
    write(*sys.argv[1:])
