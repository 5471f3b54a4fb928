"""Chat templates of 200 shapes, and five conversations: what the engine's templates are compared on.

Templates of families as these publish them, and one line for each thing that templates do: every filter, test, method
and operator, white space, scopes, loops and macros, what is undefined, and what fails."""

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
expression behind a block: {% if true %}   {{ 1 }}{% endif %}\n\t {{ 2 }}
block kept by plus: a\n  {%+ if true %}b{% endif %}\nc{% if true +%}\nd{% endif %}
plus in expression: a {{+ 1 }} b {{- 2 -}} c
minus both: a  \n {%- if true -%} \n b \n {%- endif -%}  c
minus takes wide spaces: a\u3000\u00a0{%- if true -%}\u2028 b{% endif %}
lstrip of tabs: a\n\t \t{% if true %}x{% endif %}\n
lstrip needs a line: a {% if true %}b{% endif %} {% if true %}\nc{% endif %}
comment on a line: a\n  {# one\ntwo #}\nb{#- x -#}  c{#+ y +#}\nd
newlines of blocks: {% set a = 1 %}\n\n{% set b = 2 %}\n{{ a }}{{ b }}\n\n
one newline at the end: x\n
two newlines at the end: x\n\n
carriage returns: a\r\n{% if true %}\r\nb{% endif %}\rc\r\n
raw: {% raw %}{{ x }} {% if %}{% endraw %}{{ 1 }}
raw with minus: a {%- raw -%}  {{ x }}  {%- endraw -%} b
raw on lines: a\n  {% raw %}\n  {{ x }}\n  {% endraw %}\nb
raw plus: a\n  {%+ raw %} x {% endraw +%}\nb
braces in text: { {x} } }} %} #} {
braces in expression: {{ {'a': {'b': 1}}['a']['b'] }}{{ {} }}{{ [[1]] }}
string escapes: {{ 'a\tb\\n\x41\u00e9\U0001F600\101\0!\q\'' }}|{{ "\"\'" }}
backslash newline: {{ 'a\\\nb' }}
backslash before a letter beyond ascii: {{ '\é\日' }}
name of a character: {{ '\N{BULLET}\N{LATIN SMALL LETTER E WITH ACUTE}' }}
strings beside each other: {{ 'a' "b" 'c' }}
newline in a string: {{ 'a\nb' }}
numbers: {{ 1_000 }} {{ 0x1F }} {{ 0b101 }} {{ 0o17 }} {{ 1.5e3 }} {{ 2e-7 }} {{ 1e16 }} {{ 1.0 }} {{ 0.1 + 0.2 }}
division: {{ 7 / 2 }} {{ 8 / 2 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % -3 }} {{ -7 % 3 }} {{ 7.5 // 2 }} {{ -7.5 % 2 }}
power: {{ 2 ** 3 }} {{ 2 ** -1 }} {{ 2 ** 0.5 }} {{ 2 ** 3 ** 2 }} {{ -2 ** 2 }} {{ 10 ** 15 }}
signs: {{ -1 }} {{ +1 }} {{ --1 }} {{ 1 - -1 }} {{ -1.5 }} {{ +true }} {{ -true }}
booleans count: {{ true + true }} {{ true * 3 }} {{ true == 1 }} {{ false < true }} {{ 1 == 1.0 }}
strings by numbers: {{ 'ab' * 3 }}|{{ 2 * 'x' }}|{{ 'a' * -1 }}|{{ [1] * 2 }}|{{ (1, 2) + (3,) }}|{{ [1] + [2] }}
tilde: {{ 1 ~ 'a' ~ none ~ true ~ 1.0 ~ [1] ~ nothing ~ {'a': 'b'} }}
none and booleans: {{ none }} {{ None }} {{ true }} {{ True }} {{ false }}
lists print: {{ [1, 'a', none, true, 1.5, [], {}, (), (1,), 'it\'s', "q\"'"] }}
dicts print: {{ {'a': 1, 2: 'b', none: true, (1, 2): [3]} }}
strings in lists: {{ ['é日', '\u200b', '\x00\x7f\n\r\t\\', '\u00ad', '\U0001F600', '\u3000'] }}
characters not bytes: {% set s = 'héllo 日本😀' %}{{ s | length }} {{ s[1] }} {{ s[-1] }} {{ s[6:8] }} {{ s[::-1] }} {{ s[1:4] }}
slices: {% set l = [0, 1, 2, 3, 4] %}{{ l[1:3] }}{{ l[:-1] }}{{ l[::2] }}{{ l[::-1] }}{{ l[3:0:-2] }}{{ l[-2:] }}{{ l[10:] }}{{ (1, 2, 3)[1:] }}
slices of a string: {{ 'abcdef'[1:-1] }} {{ 'abcdef'[-3:] }} {{ 'abcdef'[4:1:-1] }} {{ 'abc'[5:] }}|
items: {{ [1, 2][0] }} {{ [1, 2][-1] }} {{ [1, 2].1 }} {{ {'a': 1}.a }} {{ {'a': 1}['a'] }} {{ (1, 2)[true] }}
missing items: [{{ [1][5] }}] [{{ {'a': 1}.b }}] [{{ {}['x'] }}] [{{ 'abc'[9] }}] [{{ none.x }}] [{{ (5).x }}]
methods before keys: {{ {'items': 1}['items'] }} {{ {'get': 2}.get('get') }}
spaces stripped: [{{ '\u3000 a\u00a0\u2028\u0085' | trim }}] [{{ '\x1c\u1680x\u2003'.strip() }}] [{{ '\u200bx\ufeff'.strip() }}]
strip of characters: {{ 'xxaxx'.strip('x') }} {{ 'abcab'.lstrip('ab') }} {{ 'abcab'.rstrip('ab') }} {{ 'éaé' | trim('é') }} [{{ ' a '.lstrip() }}]
case: {{ 'straße ŉ ǆ ﬁ' | upper }} {{ 'ÀÉÎ ΑΣ ΑΣ.Σ' | lower }} {{ 'ΌΔΟΣ'.lower() }} {{ 'İ'.lower() | length }}
capitalize: {{ 'hELLO wORLD' | capitalize }} {{ 'éCOLE'.capitalize() }} {{ 'ßx'.capitalize() }} {{ '' | capitalize }} {{ 'ǆABC'.capitalize() }}
title: {{ "hello wORLD it's a-b (c) d_e 3rd" | title }} | {{ "hello wORLD it's a-b (c) d_e 3rd".title() }}
swapcase and casefold: {{ 'aBc É'.swapcase() }} {{ 'Straße'.casefold() }}
split: {{ 'a b  c '.split() }} {{ 'a,b,,c'.split(',') }} {{ ' a b c '.split(none, 1) }} {{ 'a.b.c'.split('.', 1) }} {{ ''.split() }} {{ ''.split(',') }} {{ 'abc'.split(sep='b', maxsplit=1) }}
rsplit: {{ 'a.b.c'.rsplit('.', 1) }} {{ '  a b c '.rsplit(none, 1) }} {{ 'a\u3000b'.rsplit() }}
splitlines: {{ 'a\nb\r\nc\rd\x0be\u2028f\x85g\n'.splitlines() }} {{ 'a\nb'.splitlines(true) }} {{ ''.splitlines() }} {{ 'a\n\nb'.splitlines() | length }}
partition: {{ 'a=b=c'.partition('=') }} {{ 'a=b=c'.rpartition('=') }} {{ 'abc'.partition('x') }} {{ 'abc'.rpartition('x') }}
find: {{ 'héllo'.find('l') }} {{ 'hello'.rfind('l') }} {{ 'a'.find('b') }} {{ 'é日é'.index('日') }} {{ 'hello'.find('l', 3) }} {{ 'hello'.find('', 9) }} {{ 'aXbX'.count('X') }} {{ 'abc'.count('') }}
starts and ends: {{ 'abc'.startswith('ab') }} {{ 'abc'.startswith(('x', 'a')) }} {{ 'abc'.endswith('c', 0, 2) }} {{ 'éb'.startswith('b', 1) }} {{ 'abc'.startswith('') }}
prefix removed: {{ 'abcab'.removeprefix('ab') }} {{ 'abcab'.removesuffix('ab') }} {{ 'x'.removeprefix('y') }}
replace: {{ 'aXbXc'.replace('X', '-') }} {{ 'aXbXc'.replace('X', '-', 1) }} {{ 'aXbXc' | replace('X', '-') }} {{ 'abc' | replace('', '.') }} {{ 12 | replace(1, 'x') }} {{ 'aaa' | replace('a', 'b', 2) }}
join: {{ ','.join(['a', 'b']) }} {{ [1, none, 'x'] | join('-') }} {{ 'abc' | join('.') }} {{ [] | join(',') }} {{ messages | join('+', attribute='role') }} {{ {'a': 1, 'b': 2} | join }}
pads: [{{ 'ab'.center(7) }}] [{{ 'abc'.center(6, '*') }}] [{{ 'x' | center(4) }}] [{{ 'é'.ljust(3) }}] [{{ 'é'.rjust(3, '.') }}] {{ '-7'.zfill(4) }} {{ 'ab'.zfill(1) }}
asked of strings: {{ 'abc'.isalpha() }} {{ '12'.isdigit() }} {{ '²'.isdigit() }} {{ '½'.isnumeric() }} {{ '²'.isdecimal() }} {{ 'a1'.isalnum() }} {{ ' \u3000'.isspace() }} {{ 'Ab C'.istitle() }} {{ ''.isalpha() }} {{ 'É'.isupper() }} {{ 'a.'.islower() }}
percent: {{ '%s is %d' % ('a', 3.9) }} {{ '%05.1f|%-5s|%+d|%x|%X|%o' % (3.14159, 'ab', 5, 255, 255, 8) }} {{ '100%%' % () }} {{ '%s' % 5 }} {{ '%(a)s-%(b)02d' % {'a': 1, 'b': 2} }} {{ '%r' % 'x' }} {{ '%5s%%' % 'é' }}
format filter: {{ '%s, %s!' | format('a', 2) }} {{ '%(x)s' | format(x=1) }} {{ '%.2f' | format(2.675) }}
format method: {{ '{} {}'.format(1, 'a') }} {{ '{1}{0}'.format('a', 'b') }} {{ '{x.y[0]}'.format(x={'y': [7]}) }} {{ '{:>5}|{:<5}|{:^5}|{:05d}'.format('a', 'b', 'c', 42) }} {{ '{:.3f} {:,} {:%} {:x} {:e}'.format(3.14159, 1234567, 0.25, 255, 12345.678) }} {{ '{{}} {!r}'.format('a') }}
none filters: [{{ none | upper }}] [{{ none | string }}] [{{ none | default('x') }}] [{{ none | default('x', true) }}] [{{ none | trim }}]
default: [{{ nothing | default('a') }}] [{{ '' | default('a') }}] [{{ '' | default('a', true) }}] [{{ nothing | d }}] [{{ 0 | default(5, boolean=true) }}] [{{ messages[9].x | default('e') if messages[9] is defined else 'no' }}]
first and last: {{ [1, 2] | first }} {{ [1, 2] | last }} {{ 'héé' | first }} {{ 'abé' | last }} [{{ [] | first }}] {{ {'a': 1} | first }} {{ messages | map(attribute='role') | first }} {{ range(3) | last }}
length: {{ [] | length }} {{ 'é日' | count }} {{ {'a': 1} | length }} {{ range(4) | length }} {{ nothing | length }} {{ (1, 2) | length }}
list: {{ 'aé' | list }} {{ {'a': 1} | list }} {{ range(3) | list }} {{ nothing | list }} {{ (1, 2) | list }}
reverse: {{ 'aé日' | reverse }} {{ [1, 2, 3] | reverse | list }} {{ (1, 2) | reverse | join(',') }} {{ {'a': 1, 'b': 2} | reverse | list }}
sort: {{ [3, 1, 2] | sort }} {{ ['b', 'A', 'a', 'B'] | sort }} {{ ['b', 'A', 'a'] | sort(case_sensitive=true) }} {{ [1, 3, 2] | sort(reverse=true) }} {{ messages | sort(attribute='role') | map(attribute='role') | join(',') }} {{ [(1, 'b'), (1, 'a')] | sort }}
sort by several: {{ [{'a': 1, 'b': 2}, {'a': 1, 'b': 1}, {'a': 0, 'b': 3}] | sort(attribute='a,b') | map(attribute='b') | list }}
dictsort: {{ {'b': 1, 'A': 3, 'c': 2} | dictsort }} {{ {'b': 1, 'A': 3} | dictsort(true) }} {{ {'b': 1, 'a': 3} | dictsort(false, 'value', reverse=true) }}
unique: {{ ['a', 'A', 'b', 'a'] | unique | list }} {{ ['a', 'A'] | unique(case_sensitive=true) | list }} {{ [1, 1.0, true, 2] | unique | list }} {{ messages | unique(attribute='role') | map(attribute='role') | list }}
min and max: {{ [3, 1, 2] | min }} {{ [3, 1, 2] | max }} {{ ['b', 'A'] | min }} [{{ [] | max }}] {{ [{'a': 2}, {'a': 5}] | max(attribute='a') }}
sum: {{ [1, 2, 3] | sum }} {{ [{'a': 1}, {'a': 2.5}] | sum(attribute='a') }} {{ [] | sum }} {{ [1] | sum(start=10) }}
groupby: {% for role, group in messages | groupby('role') %}{{ role }}:{{ group | length }};{% endfor %}{% for g in [{'k': 'B'}, {'k': 'a'}, {'k': 'b'}] | groupby('k') %}{{ g.grouper }}{{ g.list | length }} {% endfor %}
batch and slice: {{ range(7) | batch(3) | list }} {{ range(7) | batch(3, 'x') | list }} {{ range(7) | slice(3) | list }} {{ range(7) | slice(3, 0) | list }}
map: {{ ['a', 'b'] | map('upper') | join }} {{ messages | map(attribute='role') | join(',') }} {{ [{'a': 1}, {}] | map(attribute='a', default=0) | list }} {{ ['1', 'x'] | map('int', 7) | list }} {{ [[1, 2], [3]] | map('length') | list }} {{ [[1, [2]]] | map(attribute='1.0') | list }}
select: {{ range(6) | select('odd') | list }} {{ range(6) | reject('divisibleby', 3) | list }} {{ [0, '', 1, none] | select | list }} {{ [1, 'a'] | select('string') | list }}
selectattr: {{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ messages | rejectattr('role', 'eq', 'user') | map(attribute='role') | list }} {{ messages | selectattr('name') | list | length }} {{ messages | selectattr('role', 'in', ['user', 'system']) | list | length }} {{ messages | selectattr('x', 'undefined') | list | length }}
a generator ends: {% set g = messages | selectattr('role', 'eq', 'user') %}{{ g | list | length }}{{ g | list | length }}{{ 'true' if g else 'false' }}
generators are lazy: {% set ns = namespace(stop=false) %}{% for m in messages if not ns.stop %}{{ m.role }}{% if m.role == 'user' %}{% set ns.stop = true %}{% endif %}{% endfor %}
int: {{ '42' | int }} {{ '42.9' | int }} {{ 'x' | int }} {{ 'x' | int(7) }} {{ 3.9 | int }} {{ -3.9 | int }} {{ '0x1F' | int(base=16) }} {{ ' 7 ' | int }} {{ true | int }} {{ none | int }} {{ '1_000' | int }} {{ '' | int(default=5) }} {{ 'ff' | int(0, 16) }}
float: {{ '1.5' | float }} {{ 3 | float }} {{ 'x' | float }} {{ '1e3' | float }} {{ none | float(2.0) }} {{ 'inf' | float }}
round: {{ 42.55 | round }} {{ 42.55 | round(1) }} {{ 2.5 | round }} {{ 3.5 | round }} {{ 2.675 | round(2) }} {{ 42.55 | round(1, 'floor') }} {{ 42.51 | round(method='ceil') }} {{ 42 | round }} {{ -0.5 | round }} {{ 1234.5 | round | int }}
abs: {{ -5 | abs }} {{ 2.5 | abs }} {{ (-2.5) | abs }} {{ true | abs }}
floats print: {{ 1e15 }} {{ 1e16 }} {{ 1e-4 }} {{ 1e-5 }} {{ 123456789.123 }} {{ 1/3 }} {{ 1e22 }} {{ 5e-324 }} {{ 100.0 }} {{ 1.7976931348623157e308 }} {{ -0.0 }}
indent: {{ 'a\nb\n\nc' | indent }}|{{ 'a\nb' | indent(2, true) }}|{{ 'a\n\nb' | indent(2, blank=true) }}|{{ 'a\nb' | indent('> ') }}|{{ 'a\n' | indent(1) }}|{{ 'a\u2028b' | indent(2) }}
truncate: {{ 'foo bar baz qux' | truncate(9) }} {{ 'foo bar baz qux' | truncate(9, true) }} {{ 'foo bar baz qux' | truncate(11) }} {{ 'foo bar baz qux' | truncate(11, false, '...', 0) }} {{ 'ééééééééé' | truncate(4, true, '', 0) }}
wordcount: {{ "it's a test, é日 x_y 1.5" | wordcount }} {{ '' | wordcount }}
tojson: {{ messages[0] | tojson }} {{ {'a': [1, 2.0, none, true], 'é': '\u2028<>&\'"\\\n\x01'} | tojson }} {{ [] | tojson }} {{ {} | tojson }} {{ 'x' | tojson }}
tojson indented: {{ {'b': [1, {}], 'a': {'c': []}} | tojson(indent=2) }} {{ [1, 2] | tojson(indent='\t') }} {{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }} {{ {'a': [1, 2]} | tojson(separators=(',', ':')) }} {{ 'é😀' | tojson(ensure_ascii=true) }}
tojson keys: {{ {1: 'a', none: 'b', true: 'c', 1.5: 'd'} | tojson }} {{ (1, (2,)) | tojson }} {{ 1e16 | tojson }} {{ 1e-7 | tojson }}
items filter: {% for k, v in {'a': 1, 'b': 2} | items %}{{ k }}{{ v }}{% endfor %}{{ nothing | items | list }}
dict methods: {{ {'a': 1, 'b': 2}.items() | list }} {{ {'a': 1}.keys() | list }} {{ {'a': 1}.values() | list }} {{ {'a': 1}.get('b', 3) }} {{ {'a': 1}.get('b') }} {{ {'a': 1}.items() }} {{ {'a': 1}.keys() | length }}
list methods: {{ [1, 2, 1].count(1) }} {{ ['a', 'b'].index('b') }} {{ (1, 2).index(2) }} {{ [1].copy() }}
dict made: {{ dict(a=1, b=2) }} {{ dict({'x': 1}, y=2) }} {{ dict([('k', 'v')]) }}
range: {{ range(3) | list }} {{ range(1, 4) | list }} {{ range(5, 0, -2) | list }} {{ range(2) }} {{ range(0) | list }} {{ 2 in range(3) }} {{ range(9)[2:5] | list }} {{ range(5)[-1] }}
tests of types: {% for x in [1, 1.0, true, none, 'a', [1], (1,), {}, range(2)] %}{{ x is number }}{{ x is integer }}{{ x is float }}{{ x is boolean }}{{ x is none }}{{ x is string }}{{ x is sequence }}{{ x is iterable }}{{ x is mapping }}{{ x is true }} {% endfor %}
tests of undefined: {{ nothing is defined }}{{ nothing is undefined }}{{ nothing is none }}{{ nothing is sequence }}{{ nothing is iterable }}{{ nothing is string }}{{ nothing is callable }} {{ messages[0].x is defined }} {{ tools is defined }} {{ tools is none }} {{ pad_token is defined }} {{ bos_token is defined }}
tests by name: {{ 1 is eq 1 }} {{ 1 is ne 2 }} {{ 1 is lt 2 }} {{ 2 is ge(2) }} {{ 3 is greaterthan 2 }} {{ 'a' is in ['a'] }} {{ 4 is divisibleby 2 }} {{ 3 is odd }} {{ 3 is even }} {{ none is sameas none }} {{ true is sameas true }} {{ 1 is sameas true }} {{ 'a' is equalto 'a' }}
tests of case: {{ 'abc' is lower }} {{ 'ABC' is upper }} {{ 'Abc' is lower }} {{ '' is upper }} {{ range is callable }} {{ 'upper' is filter }} {{ 'nosuch' is filter }} {{ 'odd' is test }}
not tests: {{ 1 is not none }} {{ not 1 is none }} {{ nothing is not defined }} {{ 'a' is not in 'abc' }} {{ 1 is defined and 2 is defined }}
comparisons: {{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 'a' < 'b' }} {{ [1, 2] < [1, 3] }} {{ 1 == '1' }} {{ 'é' > 'z' }} {{ (1,) == [1] }} {{ {'a': 1} == {'a': 1.0} }} {{ none == none }} {{ nothing == nothing2 }} {{ 1 != 2 }} {{ '😀' > '\uffff' }}
in: {{ 'b' in 'abc' }} {{ 'x' not in 'abc' }} {{ 1 in [1] }} {{ 'a' in {'a': 1} }} {{ 'é' in 'café' }} {{ none in [none] }} {{ 1 in (true,) }} {{ '' in 'a' }} {{ 'x' in nothing }} {{ 'role' in messages[0] }}
and or not: {{ 1 and 2 }} {{ 0 and 2 }} {{ 0 or 'x' }} {{ '' or [] }} {{ not '' }} {{ not 0 and not none }} {{ 1 or nothing.x }} {{ {} and 1 }} {{ nothing or 'd' }}
conditions: {{ 'a' if true else 'b' }} {{ 'a' if false }}| {{ 'a' if 0 else 'b' if 0 else 'c' }} {{ ('x' if false) is defined }} {{ 1 if 2 if 0 else 3 }}
truth: {% for x in [0, 1, '', 'a', [], [0], {}, {'a': 1}, none, 0.0, 0.1, (), (0,)] %}{{ 't' if x else 'f' }}{% endfor %}{{ 't' if {} else 'f' }}{{ 't' if range(0) else 'f' }}
elif: {% for m in messages %}{% if m.role == 'system' %}S{% elif m.role == 'user' %}U{% elif m.role == 'assistant' %}A{% else %}?{% endif %}{% endfor %}
set in if: {% if true %}{% set x = 1 %}{% endif %}{{ x }}{% if false %}{% set y = 1 %}{% endif %}[{{ y }}]
set in a loop stays there: {% set x = 0 %}{% for m in messages %}{% set x = x + 1 %}{{ x }}{% endfor %}{{ x }}
namespace: {% set ns = namespace(n=0, seen=[]) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.seen = ns.seen + [m.role] %}{% endfor %}{{ ns.n }}{{ ns.seen }}{{ ns.other is defined }}{{ ns['n'] }}{{ namespace({'a': 1}, b=2) }}
set several: {% set a, b = 1, 2 %}{{ a }}{{ b }}{% set (c, d) = [3, 4] %}{{ c }}{{ d }}{% set t = 5, 6 %}{{ t }}{% set e, (f, g) = 1, (2, 3) %}{{ g }}
set block: {% set x %}a{{ 1 }}\n b{% endset %}[{{ x }}]{{ x | length }}
set block filtered: {% set x | upper | replace('A', 'b') %}xa{% endset %}{{ x }}
set hides what is around: {% for m in messages %}{{ bos_token }}{% endfor %}{% set bos_token = 'B' %}{{ bos_token }}
set in a branch of a loop: {% for m in messages %}{% if loop.first %}{% set eos_token = 'E' %}{% endif %}{{ eos_token }}{% endfor %}{{ eos_token }}
set before read in a loop: {% for i in range(3) %}{% set v = i %}{{ v }}{% endfor %}[{{ v }}]
loop variables: {% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }}{{ loop.depth0 }};{% endfor %}
loop neighbours: {% for x in [1, 2, 3] %}{{ loop.previtem }}<{{ x }}>{{ loop.nextitem }} {% endfor %}{% for x in [1, 1, 2] %}{{ loop.changed(x) }}{% endfor %}
loop cycle: {% for x in range(5) %}{{ loop.cycle('a', 'b') }}{% endfor %}{% set c = cycler('x', 'y') %}{{ c.next() }}{{ c.current }}{{ c.next() }}{{ c.next() }}{{ c.reset() }}{{ c.next() }}
joiner: {% set sep = joiner(', ') %}{% for m in messages %}{{ sep() }}{{ m.role }}{% endfor %}
loop prints: {% for x in [1] %}{{ loop }}{% endfor %}
loop with if: {% for x in range(10) if x % 3 == 0 %}{{ x }}:{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}
loop else: {% for x in [] %}{{ x }}{% else %}none{% endfor %}{% for x in [1] if x > 1 %}{{ x }}{% else %}none{% endfor %}{% for x in [1] %}{{ x }}{% else %}none{% endfor %}
loop over pairs: {% for a, b in [(1, 2), [3, 4]] %}{{ a }}{{ b }}{% endfor %}{% for k, v in {'x': 1}.items() %}{{ k }}{{ v }}{% endfor %}{% for (a, b), c in [((1, 2), 3)] %}{{ a }}{{ b }}{{ c }}{% endfor %}
loop over a dict: {% for k in {'a': 1, 'b': 2} %}{{ k }}{% endfor %}
loop over a string: {% for c in 'aé日' %}{{ c }}.{% endfor %}
loop over undefined: {% for x in nothing %}x{% else %}empty{% endfor %}
nested loops: {% for i in range(2) %}{% for j in range(2) %}{{ loop.index }}{{ i }}{{ j }} {% endfor %}{{ loop.index }}{% endfor %}
outer loop kept: {% for i in 'ab' %}{% set outer = loop %}{% for j in 'cd' %}{{ outer.index }}{{ loop.index }}{% endfor %}{% endfor %}
break: {% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}
continue: {% for i in range(5) %}{% if i is odd %}{% continue %}{% endif %}{{ i }}{% endfor %}
break in nested: {% for i in range(3) %}{% for j in range(3) %}{% if j == 1 %}{% break %}{% endif %}{{ i }}{{ j }} {% endfor %}{% endfor %}
recursive loop: {% for n in [{'v': 1, 'c': [{'v': 2, 'c': []}, {'v': 3, 'c': [{'v': 4, 'c': []}]}]}] recursive %}{{ loop.depth }}:{{ n.v }}({{ loop(n.c) }}){% endfor %}
tuple without brackets: {% for x in 1, 2, 3 %}{{ x }}{% endfor %}{{ 1, 2 }}
macro: {% macro m(a, b='x', c=a) %}[{{ a }}{{ b }}{{ c }}]{% endmacro %}{{ m(1) }}{{ m(1, 2) }}{{ m(b=5, a=6) }}{{ m() }}
macro sees later: {% macro m() %}{{ x }}{% endmacro %}{% set x = 1 %}{{ m() }}{% set x = 2 %}{{ m() }}
macro arguments: {% macro m(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, k=4) }}{{ m(*[1, 2], **{'z': 3}) }}
macro name: {% macro m() %}{% endmacro %}{{ m.name }}{{ m }}{{ m is callable }}
macro calls itself: {% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(4) }}
macro gives text: {% macro m(x) %} {{ x }} {% endmacro %}{{ m('a') | trim | upper }}{{ m('b') ~ '!' }}{{ m('c') is string }}
macro keeps its names: {% set x = 1 %}{% macro m() %}{% set x = 2 %}{{ x }}{% endmacro %}{{ m() }}{{ x }}
call block: {% macro m(t) %}<{{ t }}>{{ caller() }}</{{ t }}>{% endmacro %}{% call m('b') %}in {{ bos_token }}{% endcall %}
call with arguments: {% macro each(l) %}{% for x in l %}{{ caller(x, loop.index) }}{% endfor %}{% endmacro %}{% call(a, i) each(['p', 'q']) %}{{ i }}{{ a }};{% endcall %}
caller or not: {% macro m() %}{% if caller is defined %}C{{ caller() }}{% else %}N{% endif %}{% endmacro %}{{ m() }}{% call m() %}x{% endcall %}
filter block: {% filter upper %}abc {{ bos_token }}{% endfilter %}{% filter replace('a', 'b') | trim %} aXa {% endfilter %}
with: {% with a = 1, b = 2 %}{{ a + b }}{% set c = 3 %}{{ c }}{% endwith %}[{{ c }}]{% with %}{% set d = 1 %}{{ d }}{% endwith %}{% set x = 1 %}{% with x = 2, y = x %}{{ x }}{{ y }}{% endwith %}
print tag: {% print 1, 'a' %}{% print bos_token %}
colon at the end: {% if true: %}a{% endif %}{% for x in [1]: %}{{ x }}{% endfor %}
safe: {{ '<a>' | safe }} {{ ('<a>' | safe) + '<b>' }} {{ '<' | e }} {{ '<b>' | escape | upper }} {{ '<' | safe | string | length }} {{ ['<'|e] }} {{ ('a'|safe) ~ '<' }} {{ '"\'&' | forceescape }}
undefined prints nothing: [{{ nothing }}] [{{ messages[0].nothing }}] [{{ messages[99] }}] [{{ nothing ~ 'x' }}] [{{ nothing | upper }}] [{{ [nothing] }}] [{{ '%s' % nothing }}]
attr: {{ {'a': 1} | attr('a') }}| {{ 'x' | attr('upper') is defined }}
underscore keys: {{ {'_a': 1}._a }} {{ {'_a': 1}['_a'] }}
last user: {% set ns = namespace(i=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.i = loop.index0 %}{% endif %}{% endfor %}{{ ns.i }} {{ messages[ns.i].content if ns.i >= 0 else 'none' }}
reversed messages: {% for m in messages[::-1] %}{{ m.role[0] }}{% endfor %}{% for m in messages | reverse %}{{ loop.revindex0 }}{% endfor %}
alternate check: {% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate: ' ~ m.role) }}{% endif %}{{ m.content | trim }}{% endfor %}
raises at once: {{ raise_exception('no') }}
raises for system: {% if messages[0].role == 'system' %}{{ raise_exception("System role not supported: '" + messages[0].content + "'") }}{% endif %}ok
think parts: {% for m in messages %}{% set c = m.content %}{% if '</think>' in c %}{% set r = c.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}{% set c = c.split('</think>')[-1].lstrip('\n') %}[{{ r }}]{% endif %}{{ c }}{% endfor %}
generation tag: {% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set z = 1 %}{{ m.content }}{{ z }}{% endgeneration %}[{{ z }}]{% endif %}{% endfor %}
content by type: {% for m in messages %}{% if m.content is string %}{{ m.content }}{% elif m.content is iterable %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}
concatenation fails: {{ 'a' + 1 }}
undefined plus: {{ nothing + 'a' }}
undefined attribute: {{ nothing.x.y }}
undefined call: {{ nothing() }}
call of a string: {{ 'a'() }}
attribute of a missing: {{ messages[0].nothing.x }}
divide by zero: {{ 1 / 0 }}
order of unlike: {{ 1 < 'a' }}
join of numbers: {{ ','.join([1]) }}
unhashable key: {{ {[1]: 2} }}
not iterable: {% for x in 5 %}{% endfor %}
too many to unpack: {% for a, b in [(1, 2, 3)] %}{% endfor %}
unsafe append: {% set l = [] %}{{ l.append(1) }}{{ l }}
unsafe update: {{ {}.update({'a': 1}) }}
unsafe without call: [{{ [].append }}] [{{ {}.pop }}]
no length: {{ (messages | map('upper')) | length }}
none has no length: {{ none | length }}
no namespace: {% set d = {} %}{% set d.x = 1 %}
namespace with underscore: {% set ns = namespace(_a=1) %}{{ ns._a }}
not all arguments: {{ '%s' % (1, 2) }}
index not found: {{ 'a'.index('b') }}
range too big: {{ range(1000000) | list | length }}
json of undefined: {{ nothing | tojson }}
macro takes no such: {% macro m(a) %}{{ a }}{% endmacro %}{{ m(b=1) }}
macro takes fewer: {% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}
loop not recursive: {% for x in [1] %}{{ loop([2]) }}{% endfor %}
sort of unlike: {{ [1, 'a'] | sort }}
tokens: {{ bos_token }}|{{ eos_token }}|{{ bos_token + 'x' }}|{{ unk_token | default('none') }}|{{ eos_token | length }}
generation prompt: {% for m in messages %}{{ m.role }}{% endfor %}{% if add_generation_prompt %}>>{% endif %}{{ add_generation_prompt }}
messages print: {{ messages }}
message prints: {{ messages[-1] }} {{ messages | last }}
message items: {% for m in messages %}{% for k, v in m.items() %}{{ k }}={{ v }};{% endfor %}{% endfor %}
long condition: {{ 'y' if messages | length > 1 and messages[0].role == 'system' and (messages[1].content or '') | trim | length > 3 else 'n' }}
precedence: {{ 1 + 2 * 3 }} {{ (1 + 2) * 3 }} {{ ('a' ~ 1) + '2' }} {{ not 1 == 2 }} {{ 2 * 3 % 4 }} {{ -1 | abs }} {{ 1 + 1 | string | length }} {{ 'a' in 'ab' == true }}
filter behind a call: {{ messages[0].content.upper() | lower | title }} {{ ('a' ~ 'b') | upper }} {{ 'a' | upper ~ 'b' }}
calls in a row: {{ ' a,b '.strip().split(',')[1].upper() }} {{ {'f': {'g': [1, {'h': 'x'}]}}.f.g[1].h }}
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
