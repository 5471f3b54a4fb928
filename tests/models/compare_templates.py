"""Chats as the engine's templates write them beside transformers' apply_chat_template.

Of every shape in shapes.py."""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from shapes import CHATS, shapes


def main(probe):
    failed = False
    for name, source in shapes().items():
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>",
                                            eos_token="</s>", chat_template=source)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "tokenizer_config.json").write_text(
                json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": source}))
            done = subprocess.run([probe, "chat", folder], text=True, capture_output=True,
                                  input="\n".join(map(json.dumps, CHATS)) + "\n")
        answers = [json.loads(line) for line in done.stdout.split("\n")[:-1]]
        wrong = [] if len(answers) == len(CHATS) else [("", done.stderr)]
        for chat, answer in zip(CHATS, answers):
            try:
                expected = {"text": tokenizer.apply_chat_template(
                    chat, tokenize=False, add_generation_prompt=True)}
            except Exception as error:  # what the template raises
                expected = {"error": str(error)}
            same = "error" in answer if "error" in expected else answer == expected
            if not same:
                wrong.append((expected, answer))
        failed |= bool(wrong)
        print(f"{'WRONG' if wrong else 'ok':6}{name:28} {len(CHATS)} chats, {len(wrong)} differ")
        for expected, answer in wrong:
            print(f"      expected {expected}\n      got      {answer}")
    return 1 if failed else 0


sys.exit(main(sys.argv[1]))
