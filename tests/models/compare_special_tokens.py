"""Tokenizers that this project writes, and special tokens named beside tokenizer.json, in transformers."""
import copy
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import PreTrainedTokenizerFast

SHIPPED = json.loads((Path(__file__).resolve().parents[2] / "models/kjv-1.8m/tokenizer.json").read_text())
TEXTS = ["In the beginning God created the heaven", "the Philistines<|endoftext|>enemies", "rep Ph<|endoftext|>",
         "h\u00e9llo <x> <y>", "<|im_start|>user\nhi<|im_end|> <think>"]
TOKEN = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
END = {"content": "<|im_end|>", **TOKEN}


def without_end():
    hole = copy.deepcopy(SHIPPED)
    del hole["model"]["vocab"]["<|endoftext|>"]
    return hole


def with_far_ids():
    far = copy.deepcopy(SHIPPED)
    far["added_tokens"] += [{"id": 2000, "content": "<x>", **TOKEN}, {"id": 1500, "content": "<y>", **TOKEN}]
    return far


CASES = {
    "the shipped model": (SHIPPED, {}),
    "a hole in the vocabulary": (without_end(), {}),
    "ids far away": (with_far_ids(), {}),
    "names in tokenizer_config.json": (SHIPPED, {"tokenizer_config.json": {
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<pad>",
        "additional_special_tokens": ["<x>", "<y>"]}}),
    "added_tokens_decoder": (SHIPPED, {"tokenizer_config.json": {
        "eos_token": "<|im_end|>", "added_tokens_decoder": {
            "1030": {"content": "<|im_start|>", **TOKEN}, "1024": {**END, "rstrip": True},
            "1025": {"content": "<x>", "special": False, "normalized": True}}}}),
    "special_tokens_map.json": (SHIPPED, {"tokenizer_config.json": {}, "special_tokens_map.json": {
        "bos_token": {k: v for k, v in END.items() if k != "special"}, "eos_token": "<y>",
        "additional_special_tokens": ["<x>"], "image_token": "<think>"}}),
    "added_tokens.json": (SHIPPED, {"tokenizer_config.json": {"eos_token": "<|im_end|>"}, "added_tokens.json": {
        "<|im_end|>": 1025, "<|im_start|>": 1024, "<x>": 1026}}),
}


def main(probe):
    failed = False
    for name, (tokenizer, files) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            for file, value in {"tokenizer_config.json": {}, **files, "tokenizer.json": tokenizer}.items():
                if file == "tokenizer_config.json":
                    value = {"tokenizer_class": "PreTrainedTokenizerFast", **value}
                Path(folder, file).write_text(json.dumps(value))
            theirs = PreTrainedTokenizerFast.from_pretrained(folder)
            done = subprocess.run([probe, "encode", f"{folder}/tokenizer.json"], text=True, capture_output=True,
                                  input="\n".join(map(json.dumps, TEXTS)) + "\n")
            expected = [[ids, theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)]
                        for ids in (theirs(text)["input_ids"] for text in TEXTS)]
        answers = [json.loads(line) for line in done.stdout.split("\n")[:-1]]
        wrong = [(e, a) for e, a in zip(expected, answers) if e != a] or ([] if len(answers) == len(TEXTS) else [done.stderr])
        failed |= bool(wrong)
        print(f"{'WRONG' if wrong else 'ok':6}{name}", *wrong, sep="\n      " if wrong else "")
    return 1 if failed else 0


sys.exit(main(sys.argv[1]))
