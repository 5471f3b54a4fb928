"""The `openai` client against a server: with_openai.py URL MODEL. Exits with 1 where an answer is not as it should be."""

import sys

import openai


def check(fact, what):
    if not fact:
        sys.exit(f"openai: {what}")


url, model = sys.argv[1:]
client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120)
said = {"model": model, "prompt": "In the beginning", "max_tokens": 12, "temperature": 0.8, "seed": 5}

check(client.models.list().data[0].id == model, "the model is not listed")

whole = client.completions.create(**said)
check(whole.usage.completion_tokens == 12, f"12 tokens were asked for: {whole.usage}")
pieces = list(client.completions.create(**said, stream=True, stream_options={"include_usage": True}))
check("".join(p.choices[0].text for p in pieces if p.choices) == whole.choices[0].text,
      "a stream differs from the whole answer")
check(pieces[-1].usage.completion_tokens == 12, "a stream has no usage at its end")

several = client.completions.create(**{**said, "prompt": ["In the beginning", "And it came"]}, n=2)
check([c.index for c in several.choices] == [0, 1, 2, 3], "two prompts with n = 2 have four choices")
check(several.choices[0].text == whole.choices[0].text, "a choice differs beside others")

rated = client.completions.create(**{**said, "max_tokens": 0}, echo=True, logprobs=3)
check(rated.choices[0].text == "In the beginning", f"echo gave {rated.choices[0].text!r}")
check(rated.choices[0].logprobs.token_logprobs[0] is None, "a first token has no log probability")
check(all(v <= 0 for v in rated.choices[0].logprobs.token_logprobs[1:]), "log probabilities above 0")

messages = [{"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Who made the stars?"}]}]
chat = {"model": model, "messages": messages, "max_completion_tokens": 10, "temperature": 0, "seed": 1}
answer = client.chat.completions.create(**chat, logprobs=True, top_logprobs=2)
check(len(answer.choices[0].logprobs.content[0].top_logprobs) == 2, "a chat's log probabilities")
pieces = client.chat.completions.create(**chat, stream=True)
check("".join(p.choices[0].delta.content or "" for p in pieces) == answer.choices[0].message.content,
      "a chat's stream differs")
with client.chat.completions.create(**{**chat, "max_completion_tokens": 500}, stream=True) as stream:
    next(iter(stream))  # and leave

for wrong, error in (({"model": "another"}, openai.NotFoundError), ({"temperature": -1}, openai.BadRequestError),
                     ({"extra_body": {"guided_regex": "a*"}}, openai.BadRequestError),
                     ({"prompt": "word " * 5000}, openai.BadRequestError)):
    try:
        client.completions.create(**{**said, **wrong})
        sys.exit(f"openai: {wrong} was answered")
    except error as refused:
        check(refused.body.get("message"), f"{wrong}: an error without a message")
try:
    client.chat.completions.create(**chat, response_format={"type": "json_object"})
    sys.exit("openai: response_format was answered")
except openai.BadRequestError as refused:
    check("response_format" in refused.message, "an error that does not name its field")
print("openai: all as it should be")
