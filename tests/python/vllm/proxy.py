"""A proxy before a prefill and a decode server: POST /v1/completions goes to both. `together`: at once, which needs to
know prefill's agent; otherwise decode is asked when prefill has answered, as NIXL's connector wants it. A prefill that
does not answer costs its work, not the request. A stream of decode's is passed on as it comes; what is asked with GET is
asked of decode."""
import http.server
import json
import threading
import urllib.error
import urllib.request
import uuid

PATIENCE = 300  # s: as long as a loaded machine may take


def post(url, body, timeout=PATIENCE):
    """(status, answer) of a server; (0, why) if it cannot be reached."""
    try:
        request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as why:
        return why.code, why.read().decode(errors="replace")
    except (OSError, ValueError) as why:
        return 0, str(why)


class Proxy:
    """`agent`, `address` and `tp_size` are prefill's, for `together`."""

    def __init__(self, prefill, decode, agent="", address="", tp_size=1):
        self.prefill, self.decode, self.agent, self.address, self.tp_size = prefill, decode, agent, address, tp_size
        self.answered = lambda: None  # called between prefill's answer and decode's question
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if body.get("stream"):
                    return self.relay(proxy.stream(body))
                status, answer = (proxy.together if proxy.agent else proxy.in_turn)(body)
                text = json.dumps(answer).encode()
                self.send_response(status or 502)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def do_GET(self):
                self.relay(urllib.request.urlopen(proxy.decode + self.path, timeout=PATIENCE))

            def relay(self, answer):
                """HTTP/1.0: the end of the connection is that of the answer."""
                with answer:
                    self.send_response(answer.status)
                    self.send_header("Content-Type", answer.headers.get("Content-Type", "text/event-stream"))
                    self.end_headers()
                    while piece := answer.read1(65536):
                        self.wfile.write(piece)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def together(self, body):
        transfer = uuid.uuid4().hex
        ask = dict(body, max_tokens=1, kv_transfer_params={"do_remote_decode": True, "transfer_id": transfer})
        threading.Thread(target=post, args=(self.prefill, ask), daemon=True).start()
        return post(self.decode, dict(body, kv_transfer_params={
            "do_remote_prefill": True, "transfer_id": transfer, "remote_agent": self.agent,
            "remote_address": self.address, "tp_size": self.tp_size}))

    def in_turn(self, body):
        return post(self.decode, self._prefilled(body))

    def stream(self, body):
        """Decode's answer, behind prefill's."""
        asked = json.dumps(self._prefilled(body)).encode()
        return urllib.request.urlopen(urllib.request.Request(
            self.decode + "/v1/completions", asked, {"Content-Type": "application/json"}), timeout=PATIENCE)

    def _prefilled(self, body):
        """What decode is asked when prefill has answered."""
        ask = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
        status, answer = post(self.prefill, dict(ask, max_tokens=1, kv_transfer_params={
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
            "remote_host": None, "remote_port": None}))
        params = answer.get("kv_transfer_params") if status == 200 else None
        self.answered()
        return dict(body, kv_transfer_params=params) if params else body
