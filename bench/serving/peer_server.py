"""A small server of OpenAI's completions around another library's model, for `vllm bench serve`.

usage: peer_server.py torch FOLDER [--port N] [--threads N]
       peer_server.py llama.cpp FOLDER/FILE.gguf [--tokenizer FOLDER] [--port N] [--threads N]

It has /health and /v1/completions of a text, streamed, greedy, of exactly as many tokens as were asked for. One request at a
time. llama_cpp.server is not used for llama.cpp because it ends at an end-of-text token and keeps back bytes that are no whole
character, of which the answers of a random model are full: its times would be of something else.

Settings are what each recommends for a processor. torch: bf16, inference mode, sdpa attention, logits of the last token only,
as many threads as were asked for, a KV cache that grows. llama.cpp: bf16 weights, flash attention, the whole prompt in one
batch, as many threads for prompts as for tokens, memory-mapped.
"""
import argparse
import http.server
import itertools
import json
import threading

CONTEXT = 1024


def torch_tokens(arguments):
    import torch
    import transformers
    torch.set_num_threads(arguments.threads)
    torch.set_num_interop_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.bfloat16, attn_implementation="sdpa").eval()

    def tokens(prompt):
        """The loop inside generate(), without what that looks at around each step."""
        with torch.inference_mode():
            ids, cache = torch.tensor([prompt]), None
            while True:
                said = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache, ids = said.past_key_values, said.logits[:, -1].argmax(-1, keepdim=True)
                yield int(ids)
    return tokens


def llama_cpp_tokens(arguments):
    import llama_cpp
    llama = llama_cpp.Llama(arguments.model, n_ctx=CONTEXT, n_batch=CONTEXT, n_ubatch=CONTEXT, n_threads=arguments.threads,
                            n_threads_batch=arguments.threads, flash_attn=True, logits_all=False, verbose=False)
    print(llama_cpp.llama_print_system_info().decode(), flush=True)

    def tokens(prompt):
        llama.reset()
        return llama.generate(prompt, top_k=1, temp=0.0, reset=True)
    return tokens


ENGINES = {"torch": torch_tokens, "llama.cpp": llama_cpp_tokens}


def handler_of(tokens, tokenizer):
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # a token is a packet

        def log_message(self, *_):
            pass

        def say(self, answer, status=200):
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self.say({}, 200 if self.path == "/health" else 404)

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt, count = tokenizer(request["prompt"]), request["max_tokens"]
            if len(prompt) + count > CONTEXT:
                return self.say({"error": {"message": f"a context has {CONTEXT} tokens at most"}}, 400)
            with lock:
                self.stream(prompt, count)

        def chunk(self, text):
            data = f"data: {text}\n\n".encode()
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        def stream(self, prompt, count):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for token in itertools.islice(tokens(prompt), count):
                self.chunk(json.dumps({"choices": [{"index": 0, "text": f" {token}", "finish_reason": None}]}))
            self.chunk(json.dumps({"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": count}}))
            self.chunk("[DONE]")
            self.wfile.write(b"0\r\n\r\n")

    return Handler


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model")
    parser.add_argument("--tokenizer", help="the folder of its tokenizer.json [the model's]")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    import tokenizers
    tokenizer = tokenizers.Tokenizer.from_file(f"{arguments.tokenizer or arguments.model}/tokenizer.json")
    tokens = ENGINES[arguments.engine](arguments)
    handler = handler_of(tokens, lambda text: tokenizer.encode(text).ids)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", arguments.port), handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main()
