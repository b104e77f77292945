"""A worker as far as a router can tell: health, models, tokens of a text, completions. It counts who was asked."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeWorker:
    """Serves on a free loopback port. A text is its token ids, written with blanks between them."""

    def __init__(self, model: str = "tiny") -> None:
        self.completions = 0
        self.paths: list[str] = []
        worker = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                worker.paths.append(self.path)
                known: dict[str, Any] = {
                    "/health": {}, "/v1/models": {"object": "list", "data": [{"id": model, "object": "model"}]},
                }  # fmt: skip
                self._answer(known.get(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
                worker.paths.append(self.path)
                if self.path == "/tokenize":
                    tokens = [int(word) for word in str(body.get("prompt", "")).split()]
                    self._answer({"tokens": tokens, "count": len(tokens), "max_model_len": 4096})
                elif self.path == "/v1/completions":
                    worker.completions += 1
                    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
                    choice = {"index": 0, "text": "x", "finish_reason": "length"}
                    self._answer({
                        "id": "1", "object": "text_completion", "created": 1, "model": model,
                        "choices": [choice], "usage": usage,
                    })  # fmt: skip
                else:
                    self._answer(None)

            def _answer(self, body: object) -> None:
                data = json.dumps({} if body is None else body).encode()
                self.send_response(404 if body is None else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
