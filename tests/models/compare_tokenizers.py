"""Ids of the engine beside those of Hugging Face's tokenizers, for the tokenizer of every family.

The vocabularies are trained here on the texts below; the pipelines around them are those of the
published files."""
import json
import random
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path

from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers,
                        pre_tokenizers, processors, trainers)

STRINGS = 20000  # for each tokenizer
ROOT = Path(__file__).resolve().parents[2]
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
ENDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["the", "The ", " we'll", "I'VE", "don't", "1234567", "3.14", "\n", "\n\n", "\r\n", "\t", " ",
         "  ", "    ", "naïve", "e\u0301te\u0301", "日本語", "ﬁ", "½", "٣٤", "Ⅳ", "😀", "👨‍👩‍👧", "Ω", "Å",
         "한국어", "\u1112\u1161\u11ab", "नमस्ते", "שלום", "\u00a0", "\u3000", "\u200b", "def f(x):", "x+=1;",
         "https://a.b/c?d=e", "...", "!?", "_", "▁", "word", "<think>", "</think>", "<|im_start|>",
         "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<unk>", "[INST]", "<0x0A>", "<", ">", "a", "b"]


# The library and ICU know different versions of Unicode; both know what is as old as this.
OLD = [chr(c) for c in range(0x80, 0x2200) if unicodedata.ucd_3_2_0.category(chr(c)) != "Cn"]


def byte_level(steps, regex, normalizer=None, decoder=True, **model):
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        steps + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    train(tokenizer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.add_special_tokens(ENDS)
    return tokenizer


def characters(pre=None, legacy=True, added=("<unk>", "<s>", "</s>")):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                           decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    # Trained with words cut apart, as sentencepiece does; the bytes come first.
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    train(trained, special_tokens=["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)],
          limit_alphabet=90)
    config = json.loads(tokenizer.to_str())
    model = json.loads(trained.to_str())["model"]
    config["model"].update(vocab=model["vocab"], merges=model["merges"])
    tokenizer = Tokenizer.from_str(json.dumps(config))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in added])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    return tokenizer


def train(tokenizer, **options):
    trainer = trainers.BpeTrainer(vocab_size=3000, show_progress=False, **options)
    texts = [p.read_text() for p in sorted(ROOT.glob("docs/*.md")) + sorted(ROOT.glob("engine/*/*.cc"))]
    tokenizer.train_from_iterator(texts + [" ".join(WORDS)] * 3, trainer)


def qwen3():
    tokenizer = byte_level([pre_tokenizers.Split(Regex(QWEN2), "isolated")], False, normalizers.NFC())
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False)
                          for t in ("<think>", "</think>")])
    return tokenizer


def llama3():
    tokenizer = byte_level([pre_tokenizers.Split(Regex(LLAMA3), "isolated")], False,
                           ignore_merges=True)
    tokenizer.add_special_tokens(["<|begin_of_text|>"])
    begin = tokenizer.token_to_id("<|begin_of_text|>")
    template = processors.TemplateProcessing(single="<|begin_of_text|> $A",
                                             special_tokens=[("<|begin_of_text|>", begin)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def odd_flags():
    tokenizer = byte_level([], True)
    tokenizer.add_tokens([
        AddedToken("<think>", lstrip=True, rstrip=True, special=False, normalized=False),
        AddedToken("word", single_word=True, special=False, normalized=False),
        AddedToken("[INST]", rstrip=True, special=True, normalized=True)])
    return tokenizer


def split_pattern(pattern):
    return [pre_tokenizers.Split(Regex(pattern), "isolated")]


FAMILIES = {
    "llama2, tinyllama, mistral": lambda: characters(),
    "mistral 0.3 (metaspace)": lambda: characters(
        pre_tokenizers.Metaspace(prepend_scheme="first", split=False), legacy=False,
        added=("<unk>", "<s>", "</s>", "[INST]")),
    "metaspace, always, split": lambda: characters(
        pre_tokenizers.Metaspace(prepend_scheme="always", split=True), legacy=False),
    "llama3": llama3,
    "qwen2.5": lambda: byte_level(split_pattern(QWEN2), False, normalizers.NFC()),
    "qwen3": qwen3,
    "smollm": lambda: byte_level([pre_tokenizers.Digits(individual_digits=True)], True),
    "gpt2, added tokens": odd_flags,
}


def strings(seed):
    """Words, code, many scripts, and any characters of the planes that are assigned."""
    draw = random.Random(seed)
    for _ in range(STRINGS):
        parts = []
        for _ in range(draw.randrange(12)):
            kind = draw.random()
            if kind < 0.8:
                parts.append(draw.choice(WORDS) + draw.choice(["", "", " "]))
            elif kind < 0.9:
                parts.append("".join(chr(draw.randrange(0x20, 0x7f)) for _ in range(draw.randrange(9))))
            else:
                parts.append("".join(draw.choice([draw.choice(OLD), chr(draw.randrange(0x4e00, 0x9fa5)),
                                                  chr(draw.randrange(0x1f300, 0x1f64f))])
                                     for _ in range(draw.randrange(6))))
        yield "".join(parts)


def main(probe):
    failed = False
    for seed, (name, make) in enumerate(FAMILIES.items()):
        tokenizer = make()
        texts = list(strings(seed))
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(tokenizer.to_str())
            file.flush()
            done = subprocess.run([probe, "encode", file.name], text=True, capture_output=True,
                                  input="\n".join(map(json.dumps, texts)) + "\n")
        if done.returncode != 0:
            print(f"WRONG {name}: {done.stderr.strip()}")
            failed = True
            continue
        wrong = []
        for text, line in zip(texts, done.stdout.splitlines(), strict=True):
            ids, decoded = json.loads(line)
            expected = tokenizer.encode(text).ids
            if ids != expected or decoded != tokenizer.decode(expected):
                wrong.append((text, expected, ids, tokenizer.decode(expected), decoded))
        failed |= bool(wrong)
        print(f"{'WRONG' if wrong else 'ok':6}{name:28} {len(texts)} strings, {len(wrong)} differ, "
              f"vocabulary of {tokenizer.get_vocab_size()}")
        for one in sorted(wrong, key=lambda w: len(w[0]))[:3]:
            print("      text {!r}\n      expected {}\n      got      {}\n      {!r}\n      {!r}".format(*one))
    return 1 if failed else 0


sys.exit(main(sys.argv[1]))
