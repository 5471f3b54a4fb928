"""Random templates by python3-jinja2 and by the engine: the same text, or an error of both; an error of the engine alone
names what is not supported.

    python3 tests/jinja/differential.py build/release/tests/models/engine_probe [COUNT] [SEED]
"""
import json
import random
import re
import subprocess
import sys
import warnings

try:
    import reference
except ImportError:
    print("skipped: python3-jinja2 is not installed")
    sys.exit(77)
import shapes

# What Python's answer is an address in, or chance; what is beyond 64 bits; and what the engine says of each.
NAMED = re.compile("not supported|an address in Python|chance in Python|64 bits|takes too long|nested too deeply"
                   "|too large|not divided|views of dict|there is no order of nan")
ATOMS = ["1", "0", "-3", "2.5", "7", "1e3", "true", "false", "none", "nothing", "'a'", "''", "' b c '", "'Héé日😀'", "'x,y,,z'",
         "'12'", "'-4.5'", "'<&>'", "'a\\nb\\n\\nc'", "[]", "[1, 2, 3]", "['b', 'A', 'é']", "[0, '', none, 'x']", "{}",
         "{'a': 1, 'b': [2, {'c': 'd'}]}", "(1, 'z')", "range(4)", "messages", "messages[0]", "messages[-1].content",
         "bos_token", "ns", "ns.v", "loop", "m", "m.role", "x", "y", "[[1, 'b'], [2, 'a']]", "'%s-%s'", "'{}|{x}'"]
BINARY = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", "<=", ">", ">=", "in", "not in", "and", "or"]
FILTERS = ["abs", "batch(2)", "batch(3, 'f')", "capitalize", "center(9)", "count", "d('q')", "default('q', true)", "dictsort",
           "e", "escape", "first", "float", "float(1.5)", "format('p', 'q')", "groupby('role')", "indent", "indent(2, true)",
           "indent('-', blank=true)", "int", "int(9)", "int(base=16)", "items", "join", "join('-')", "join('+', 'role')", "last",
           "length", "list", "lower", "map('upper')", "map(attribute='role')", "map('int')", "map('default', 'q')", "max", "min",
           "reject('odd')", "select", "select('string')", "select('gt', 1)", "selectattr('role')",
           "selectattr('role', 'eq', 'user')", "rejectattr('role', 'in', 'user')", "replace('a', 'bb')", "replace('', '.')",
           "replace('e', '', 1)", "reverse", "round", "round(1)", "round(1, 'ceil')", "safe", "slice(2)", "sort",
           "sort(reverse=true)", "sort(attribute='role')", "sort(case_sensitive=true)", "string", "sum", "title", "tojson",
           "tojson(indent=2)", "tojson(sort_keys=true, ensure_ascii=true)", "trim", "trim('a ')", "truncate(5)",
           "truncate(4, true, '', 0)", "unique", "unique(true)", "upper", "wordcount", "attr('role')", "list | length"]
TESTS = ["defined", "undefined", "none", "boolean", "true", "false", "integer", "float", "number", "string", "mapping",
         "iterable", "sequence", "callable", "escaped", "lower", "upper", "odd", "even", "divisibleby(2)", "in [1, 'a']",
         "eq 1", "ne('a')", "lt 3", "ge 2", "sameas none", "sameas true", "filter", "test"]
METHODS = ["strip()", "lstrip()", "rstrip('c ')", "split()", "split(',')", "split(none, 1)", "rsplit(',', 1)", "splitlines()",
           "splitlines(true)", "upper()", "lower()", "title()", "capitalize()", "swapcase()", "casefold()", "startswith('a')",
           "endswith(('c ', 'x'))", "find('é')", "rfind('é', 1)", "index('a')", "count('é')", "count(1)", "replace('é', 'e')",
           "replace('é', 'e', 1)", "join(['p', 'q'])", "join(m)", "partition(',')", "rpartition('é')", "removeprefix('H')",
           "removesuffix('c')", "center(8, '*')", "ljust(4)", "rjust(4)", "zfill(6)", "isdigit()", "isalpha()", "isspace()",
           "islower()", "istitle()", "isalnum()", "format(1, x=2)", "items()", "keys()", "values()", "get('a')",
           "get('role', 'n')", "copy()", "append(1)", "update({})", "items() | list", "nothing", "role", "a", "b", "name"]
SUBSCRIPTS = ["[0]", "[-1]", "[1:]", "[:-1]", "[::-1]", "[::2]", "[5]", "['a']", "['role']", "[1:3]", "[-3:-1]", "[none]", "[1.0]"]
SPACES = ["", "", "", " ", "\n", "  \n  ", "\n\n", "\t", "\u00a0\n", "x", " y ", "\r\n"]


class Maker:
    def __init__(self, seed):
        self.random = random.Random(seed)

    def pick(self, of):
        return self.random.choice(of)

    def expression(self, depth):
        kind = self.random.randrange(14)
        if depth <= 0 or kind < 2:
            return self.pick(ATOMS)
        inner = self.expression(depth - 1)
        if kind < 5:
            return f"{inner} | {self.pick(FILTERS)}"
        if kind < 6:
            return f"({inner}) is {self.pick(['', 'not '])}{self.pick(TESTS)}"
        if kind < 8:
            return f"({inner}).{self.pick(METHODS)}"
        if kind < 9:
            return f"({inner}){self.pick(SUBSCRIPTS)}"
        if kind < 12:
            return f"({inner}) {self.pick(BINARY)} ({self.expression(depth - 1)})"
        if kind < 13:
            return f"{inner} if {self.expression(depth - 1)} else {self.expression(depth - 1)}"
        return self.pick([f"[{inner}, {self.expression(depth - 1)}]", f"not {inner}", f"-({inner})", f"{{'k': {inner}}}",
                          f"({inner},)", f"mac({inner})", f"{inner} ~ '|' ~ {self.expression(depth - 1)}"])

    def tag(self, text):
        return "{%" + self.pick(["", "", "", "-", "+"]) + f" {text} " + self.pick(["", "", "", "-", "+"]) + "%}"

    def space(self):
        return self.pick(SPACES)

    def body(self, depth):
        return "".join(self.space() + self.statement(depth) for _ in range(self.random.randrange(1, 4))) + self.space()

    def statement(self, depth):
        kind = self.random.randrange(16)
        if depth <= 0 or kind < 6:
            sign = self.pick(["", "", "-"])
            return "{{" + sign + f" {self.expression(self.random.randrange(4))} " + self.pick(["", "", "-"]) + "}}"
        e = lambda: self.expression(2)
        inner = self.body(depth - 1)
        if kind < 8:
            otherwise = self.tag("else") + self.body(depth - 1) if self.random.random() < 0.4 else ""
            return self.tag(f"if {e()}") + inner + otherwise + self.tag("endif")
        if kind < 11:
            name = self.pick(["m", "x", "m", "y"])
            test = self.pick(["", "", f" if {e()}"])
            extra = self.pick(["", "{{ loop.index }}", self.tag("break"), self.tag(f"if {e()}") + self.tag("continue") + self.tag("endif"),
                               "{{ loop.last }}{{ loop.length }}", "{{ loop.previtem }}{{ loop.nextitem }}"])
            over = self.pick(["messages", "[1, 2, 3]", "'abé'", "range(3)", e()])
            otherwise = self.tag("else") + "E" if self.random.random() < 0.3 else ""
            return self.tag(f"for {name} in {over}{test}") + inner + extra + otherwise + self.tag("endfor")
        if kind < 13:
            return self.tag(f"set {self.pick(['x', 'y', 'ns.v', 'bos_token', 'x, y'])} = {e()}")
        if kind < 14:
            return self.tag(f"set {self.pick(['x', 'y'])}{self.pick(['', ' | upper', ' | trim'])}") + inner + self.tag("endset")
        if kind < 15:
            return self.pick([self.tag("filter upper") + inner + self.tag("endfilter"),
                              self.tag(f"with x = {e()}") + inner + self.tag("endwith"),
                              self.tag("raw") + inner + self.tag("endraw"),
                              "{#" + self.pick(["", "-", "+"]) + " c " + self.pick(["", "-", "+"]) + "#}"])
        return self.tag("macro mac(x, y='d')") + inner + self.tag("endmacro")

    def template(self):
        begin = "{% set ns = namespace(v=1) %}" if self.random.random() < 0.7 else ""
        return begin + self.body(2)


def wrong(expected, got):
    if "text" in expected:
        if re.search(r" at 0x[0-9a-f]+>|<function|<built-in|<bound", expected["text"]):
            return "text" in got
        if "text" in got:
            return got["text"] != expected["text"]
        return not NAMED.search(got.get("refused") or got["error"])
    return "text" in got


def main(probe, count=3000, seed=0):
    warnings.simplefilter("ignore")  # of what Python thinks of the templates
    env = reference.environment()
    cases = []
    for i in range(seed, seed + count):
        maker = Maker(i)
        cases.append((i, maker.template(), maker.pick(shapes.CHATS)))
    lines = [json.dumps({"source": source, "tokens": shapes.TOKENS, "messages": chat, "prompt": True}) for _, source, chat in cases]
    done = subprocess.run([probe, "templates"], input="\n".join(lines) + "\n", capture_output=True, text=True)
    answers = [json.loads(line) for line in done.stdout.split("\n")[:-1]]
    failed = len(answers) != len(cases)
    if failed:
        print(f"the probe answered {len(answers)} of {len(cases)} templates: {done.stderr}")
    texts = named = 0
    for (i, source, chat), got in zip(cases, answers):
        expected = reference.render(env, source, chat, shapes.TOKENS)
        texts += "text" in expected
        named += "text" in expected and "text" not in got
        if wrong(expected, got):
            failed = True
            print(f"seed {i}: {source!r}\n   Jinja2 {expected}\n   engine {got}")
    print(f"{len(cases)} templates: {texts} have a text, {named} of which the engine refuses by name")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
