"""Chat templates, and five conversations: what the engine's templates are compared on.

Templates of families as these publish them, and one line for each thing that depends on how Jinja2 is set up or on what
the process around it adds: white space, tags, functions and filters of transformers' own, what the sandbox forbids,
what is undefined, what fails, and values that pass through JSON."""

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

FAMILIES = {"chatml (smollm2, qwen2)": CHATML, "llama2": LLAMA2, "llama3.2": LLAMA3, "zephyr (tinyllama)": ZEPHYR,
            "mistral": MISTRAL, "qwen3": QWEN}

TOOLS = """{%- macro render_tool(tool, depth=0) -%}
{{ '  ' * depth }}- {{ tool.name | default('?') }}{% if tool.args is defined and tool.args %}({% for k, v in tool.args | dictsort %}{{ k }}: {{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}){% endif %}
{%- endmacro -%}
{%- set calls = [{'name': 'f', 'args': {'b': [1, 2.5, none], 'a': {'x': true}}}, {'name': 'g'}, {}] -%}
{% for c in calls %}{{ render_tool(c, depth=loop.index0) }}
{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"""

QWEN_CODER = """{% macro render_extra_keys(json_dict, handled_keys) %}
    {%- if json_dict is mapping %}
        {%- for json_key in json_dict if json_key not in handled_keys %}
            {%- if json_dict[json_key] is string %}
                {{-'\\n<' ~ json_key ~ '>' ~ json_dict[json_key] ~ '</' ~ json_key ~ '>' }}
            {%- else %}
                {{- '\\n<' ~ json_key ~ '>' ~ (json_dict[json_key] | tojson | safe) ~ '</' ~ json_key ~ '>' }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for m in messages %}{{ render_extra_keys(m, ['role']) }}
{%- set value = m.content | tojson | safe if m.content is mapping or (m.content is sequence and m.content is not string) else m.content | string %}
{{- value }}{% endfor %}"""

# Each is "what it is about: template"; white space counts.
LINES = r"""
block on a line: {% for m in messages %}\n  {% if m.role == 'user' %}\n    {{ m.content }}\n  {% endif %}\n{% endfor %}end
expression indented: a\n    {{ messages[0].content }}\n  b
block kept by plus: a\n  {%+ if true %}b{% endif %}\nc{% if true +%}\nd{% endif %}
minus both: a  \n {%- if true -%} \n b \n {%- endif -%}  c
comment on a line: a\n  {# one\ntwo #}\nb{#- x -#}  c{#+ y +#}\nd
one newline at the end: x\n
carriage returns: a\r\n{% if true %}\r\nb{% endif %}\rc\r\n
name of a character: {{ '\N{BULLET}\N{LATIN SMALL LETTER E WITH ACUTE}' }}
lists print: {{ [1, 'a', none, true, 1.5, [], {}, (), (1,), 'it\'s', "q\"'"] }}
spaces stripped: [{{ '\u3000 a\u00a0\u2028\u0085' | trim }}] [{{ '\x1c\u1680x\u2003'.strip() }}] [{{ '\u200bx\ufeff'.strip() }}]
format method: {{ '{} {}'.format(1, 'a') }} {{ '{1}{0}'.format('a', 'b') }} {{ '{x.y[0]}'.format(x={'y': [7]}) }} {{ '{:>5}|{:<5}|{:^5}|{:05d}'.format('a', 'b', 'c', 42) }} {{ '{:.3f} {:,} {:%} {:x} {:e}'.format(3.14159, 1234567, 0.25, 255, 12345.678) }} {{ '{{}} {!r}'.format('a') }}
default: [{{ nothing | default('a') }}] [{{ '' | default('a') }}] [{{ '' | default('a', true) }}] [{{ nothing | d }}] [{{ 0 | default(5, boolean=true) }}] [{{ messages[9].x | default('e') if messages[9] is defined else 'no' }}]
a generator ends: {% set g = messages | selectattr('role', 'eq', 'user') %}{{ g | list | length }}{{ g | list | length }}{{ 'true' if g else 'false' }}
tojson: {{ messages[0] | tojson }} {{ {'a': [1, 2.0, none, true], 'é': '\u2028<>&\'"\\\n\x01'} | tojson }} {{ [] | tojson }} {{ {} | tojson }} {{ 'x' | tojson }}
tojson indented: {{ {'b': [1, {}], 'a': {'c': []}} | tojson(indent=2) }} {{ [1, 2] | tojson(indent='\t') }} {{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }} {{ {'a': [1, 2]} | tojson(separators=(',', ':')) }} {{ 'é😀' | tojson(ensure_ascii=true) }}
tojson keys: {{ {1: 'a', none: 'b', true: 'c', 1.5: 'd'} | tojson }} {{ (1, (2,)) | tojson }} {{ 1e16 | tojson }} {{ 1e-7 | tojson }}
dict methods: {{ {'a': 1, 'b': 2}.items() | list }} {{ {'a': 1}.keys() | list }} {{ {'a': 1}.values() | list }} {{ {'a': 1}.get('b', 3) }} {{ {'a': 1}.get('b') }} {{ {'a': 1}.items() }} {{ {'a': 1}.keys() | length }}
tests of undefined: {{ nothing is defined }}{{ nothing is undefined }}{{ nothing is none }}{{ nothing is sequence }}{{ nothing is iterable }}{{ nothing is string }}{{ nothing is callable }} {{ messages[0].x is defined }} {{ tools is defined }} {{ tools is none }} {{ pad_token is defined }} {{ bos_token is defined }}
set in a loop stays there: {% set x = 0 %}{% for m in messages %}{% set x = x + 1 %}{{ x }}{% endfor %}{{ x }}
namespace: {% set ns = namespace(n=0, seen=[]) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.seen = ns.seen + [m.role] %}{% endfor %}{{ ns.n }}{{ ns.seen }}{{ ns.other is defined }}{{ ns['n'] }}{{ namespace({'a': 1}, b=2) }}
loop variables: {% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }}{{ loop.depth0 }};{% endfor %}
break: {% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}
continue: {% for i in range(5) %}{% if i is odd %}{% continue %}{% endif %}{{ i }}{% endfor %}
recursive loop: {% for n in [{'v': 1, 'c': [{'v': 2, 'c': []}, {'v': 3, 'c': [{'v': 4, 'c': []}]}]}] recursive %}{{ loop.depth }}:{{ n.v }}({{ loop(n.c) }}){% endfor %}
macro: {% macro m(a, b='x', c=a) %}[{{ a }}{{ b }}{{ c }}]{% endmacro %}{{ m(1) }}{{ m(1, 2) }}{{ m(b=5, a=6) }}{{ m() }}
call block: {% macro m(t) %}<{{ t }}>{{ caller() }}</{{ t }}>{% endmacro %}{% call m('b') %}in {{ bos_token }}{% endcall %}
safe: {{ '<a>' | safe }} {{ ('<a>' | safe) + '<b>' }} {{ '<' | e }} {{ '<b>' | escape | upper }} {{ '<' | safe | string | length }} {{ ['<'|e] }} {{ ('a'|safe) ~ '<' }} {{ '"\'&' | forceescape }}
undefined prints nothing: [{{ nothing }}] [{{ messages[0].nothing }}] [{{ messages[99] }}] [{{ nothing ~ 'x' }}] [{{ nothing | upper }}] [{{ [nothing] }}] [{{ '%s' % nothing }}]
underscore keys: {{ {'_a': 1}._a }} {{ {'_a': 1}['_a'] }}
alternate check: {% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate: ' ~ m.role) }}{% endif %}{{ m.content | trim }}{% endfor %}
raises at once: {{ raise_exception('no') }}
raises for system: {% if messages[0].role == 'system' %}{{ raise_exception("System role not supported: '" + messages[0].content + "'") }}{% endif %}ok
think parts: {% for m in messages %}{% set c = m.content %}{% if '</think>' in c %}{% set r = c.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}{% set c = c.split('</think>')[-1].lstrip('\n') %}[{{ r }}]{% endif %}{{ c }}{% endfor %}
generation tag: {% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set z = 1 %}{{ m.content }}{{ z }}{% endgeneration %}[{{ z }}]{% endif %}{% endfor %}
content by type: {% for m in messages %}{% if m.content is string %}{{ m.content }}{% elif m.content is iterable %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}
undefined attribute: {{ nothing.x.y }}
divide by zero: {{ 1 / 0 }}
unsafe append: {% set l = [] %}{{ l.append(1) }}{{ l }}
unsafe update: {{ {}.update({'a': 1}) }}
unsafe without call: [{{ [].append }}] [{{ {}.pop }}]
no namespace: {% set d = {} %}{% set d.x = 1 %}
namespace with underscore: {% set ns = namespace(_a=1) %}{{ ns._a }}
range too big: {{ range(1000000) | list | length }}
json of undefined: {{ nothing | tojson }}
tokens: {{ bos_token }}|{{ eos_token }}|{{ bos_token + 'x' }}|{{ unk_token | default('none') }}|{{ eos_token | length }}
generation prompt: {% for m in messages %}{{ m.role }}{% endfor %}{% if add_generation_prompt %}>>{% endif %}{{ add_generation_prompt }}
messages print: {{ messages }}
message items: {% for m in messages %}{% for k, v in m.items() %}{{ k }}={{ v }};{% endfor %}{% endfor %}
date set: {% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}{{ date_string }}
strftime: {{ strftime_now('%%') }} {{ strftime_now('%Y') | length }} {{ strftime_now('%d %b %Y') | length > 9 }}
"""


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


CHATS = [
    [turn("user", "Hi")],
    [turn("system", " Be brief. "), turn("user", "  What is 2 + 2?\n")],
    [turn("user", "a {{ b }} {% c %}"), turn("assistant", "<think>\nx\n</think>\n\n'\"\\ & <b>"), turn("user", "é 日本 😀")],
    [turn("system", "s"), turn("user", "", name="Ann"), turn("assistant", "two\nlines "), turn("user", "again\u3000")],
    [turn("user", "one"), turn("user", "two"), turn("tool", "{\"a\": 1}")],
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def shapes():
    """Names and sources, in order."""
    all_of_them = {**FAMILIES, "tools": TOOLS, "qwen3 coder": QWEN_CODER}
    for line in LINES.strip().split("\n"):
        name, source = line.split(": ", 1)
        # Outside of tags a line end is a line end; within strings the template reads it.
        assert name not in all_of_them, name
        all_of_them[name] = unescape(source)
    return all_of_them


def unescape(source):
    """Escapes of text between tags; what is in tags stays for the template to read."""
    out, depth, i = "", 0, 0
    while i < len(source):
        two = source[i:i + 2]
        if two in ("{{", "{%", "{#") and depth == 0:
            depth = 1
        elif two in ("}}", "%}", "#}") and depth == 1:
            depth = 0
        if depth == 0 and two in ("\\n", "\\t", "\\r"):
            out, i = out + {"n": "\n", "t": "\t", "r": "\r"}[two[1]], i + 2
        elif depth == 0 and two == "\\u":
            out, i = out + chr(int(source[i + 2:i + 6], 16)), i + 6
        else:
            out, i = out + source[i], i + 1
    return out
