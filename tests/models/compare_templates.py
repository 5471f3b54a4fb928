"""Chats as the engine's templates write them beside transformers' apply_chat_template.

Templates in the manner of those that the families publish: what they use of Jinja is what counts."""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
Be helpful.<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>
'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("roles must alternate") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- endif %}
{%- endfor %}
"""

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if '</think>' in message.content %}
            {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

TRIMMED = """{{ bos_token }}
  {%- for m in messages %}
[{{ m.role | upper }}]{{ m.content }}{% if loop.last %}{{ eos_token }}{% endif %}
  {% endfor %}"""

TEMPLATES = {"chatml (smollm2, qwen2)": CHATML, "llama2": LLAMA2, "llama3.2": LLAMA3,
             "zephyr (tinyllama)": ZEPHYR, "mistral": MISTRAL, "qwen3": QWEN, "blocks trimmed": TRIMMED}


def turn(role, content):
    return {"role": role, "content": content}


CHATS = [
    [turn("user", "Hi")],
    [turn("system", " Be brief. "), turn("user", "  What is 2 + 2?\n")],
    [turn("user", "a {{ b }} {% c %}"), turn("assistant", "<think>\nx\n</think>\n\n'\"\\ & <b>"), turn("user", "é 日本 😀")],
    [turn("system", "s"), turn("user", ""), turn("assistant", "two\nlines "), turn("user", "again")],
    [turn("user", "one"), turn("user", "two")],
]


def main(probe):
    failed = False
    for name, source in TEMPLATES.items():
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>",
                                            eos_token="</s>", chat_template=source)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "tokenizer_config.json").write_text(
                json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": source}))
            done = subprocess.run([probe, "chat", folder], text=True, capture_output=True,
                                  input="\n".join(map(json.dumps, CHATS)) + "\n")
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        wrong = [] if len(answers) == len(CHATS) else [("", done.stderr)]
        for chat, answer in zip(CHATS, answers):
            try:
                expected = {"text": tokenizer.apply_chat_template(
                    chat, tokenize=False, add_generation_prompt=True)}
            except Exception as error:  # what the template raises
                expected = {"error": str(error)}
            same = (expected["error"] in answer.get("error", "") if "error" in expected
                    else answer == expected)
            if not same:
                wrong.append((expected, answer))
        failed |= bool(wrong)
        print(f"{'WRONG' if wrong else 'ok':6}{name:28} {len(CHATS)} chats, {len(wrong)} differ")
        for expected, answer in wrong:
            print(f"      expected {expected}\n      got      {answer}")
    return 1 if failed else 0


sys.exit(main(sys.argv[1]))
