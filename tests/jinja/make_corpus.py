"""Writes corpus.json, what python3-jinja2 makes of the shapes: run it again after a change of shapes.py.

    python3 tests/jinja/make_corpus.py
"""
import json
from pathlib import Path

import reference
import shapes


def main():
    env = reference.environment()
    lines = []
    for name, source in shapes.shapes().items():
        answers = [reference.render(env, source, chat, shapes.TOKENS) for chat in shapes.CHATS]
        # Python's own words for what fails are not compared.
        answers = [{"error": ""} if "error" in one else one for one in answers]
        if all(one == answers[0] for one in answers):
            answers = answers[:1]  # of all chats
        lines.append(json.dumps({"name": name, "source": source, "answers": answers}, ensure_ascii=True))
    head = json.dumps({"tokens": shapes.TOKENS, "chats": shapes.CHATS}, ensure_ascii=True)
    Path(__file__).with_name("corpus.json").write_text(f"[{head},\n" + ",\n".join(lines) + "\n]\n")


main()
