"""An OpenAI-compatible endpoint on this machine, for tests: `answer(request body) -> reply` says what it does."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class JudgeServer:
    """Serves `answer(body)`: a text, or (status, headers, bytes); keeps what it was asked."""

    def __init__(self, answer):
        self.answer, self.bodies, self.headers, self.times = answer, [], [], []
        self.under_way = self.most_under_way = 0
        lock, outer = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.bodies.append(body)
                    outer.headers.append(dict(self.headers))
                    outer.times.append(time.monotonic())
                    outer.under_way += 1
                    outer.most_under_way = max(outer.most_under_way, outer.under_way)
                try:
                    found = outer.answer(body)
                finally:
                    with lock:  # before the reply: whoever has it may send the next request at once
                        outer.under_way -= 1
                self.reply(found)

            def reply(self, found):
                status, headers, data = found if isinstance(found, tuple) else (200, {}, completion(found))
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self.send_response(status)
                    for name, value in {"Content-Length": len(data), **headers}.items():
                        self.send_header(name, str(value))
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128  # the default, 5, turns away some of the requests of a judge with many at once

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def completion(text):
    """A chat completion with usage."""
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}).encode()


def asked(body):
    """The text of the last message of a request."""
    return body["messages"][-1]["content"]
