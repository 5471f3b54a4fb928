"""Jinja2 as transformers' apply_chat_template sets it up."""
import copy
import json
from datetime import datetime

import jinja2
import jinja2.ext
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_say"), [], [], body).set_lineno(line)

    def _say(self, caller):
        return caller()


class Namespace(jinja2.utils.Namespace):
    def __init__(*args, **kwargs):
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            Namespace.check(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name, value):
        Namespace.check(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)

    @staticmethod
    def check(name):
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError("underscore-prefixed attribute")


class RaisedByTemplate(jinja2.exceptions.TemplateError):
    pass


def environment():
    def raise_exception(message):
        raise RaisedByTemplate(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                         extensions=[Generation, jinja2.ext.loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
    made.globals["namespace"] = Namespace
    return made


def render(env, source, messages, tokens, prompt=True):
    """{"text"}, {"raised": the template's words} or {"error": what Python says}."""
    try:
        return {"text": env.from_string(source).render(
            messages=copy.deepcopy(messages), tools=None, documents=None, add_generation_prompt=prompt, **tokens)}
    except RaisedByTemplate as error:
        return {"raised": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
