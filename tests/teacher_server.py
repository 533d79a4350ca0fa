"""A server with OpenAI's interface on this machine that answers as a test wants it to, well or badly."""

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate, pairwise
from typing import Any

Fields = dict[str, Any]


@dataclass
class Response:
    """What the server sends. `cut` bytes at the end are announced and not sent; `wait` seconds pass before."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut: int = 0
    wait: float = 0.0


def worked(prompt: str) -> str:
    """The right answer to a problem of the task `arithmetic`."""
    first, *steps = re.findall(r"[+-]?\d+", prompt)
    totals = list(accumulate(map(int, steps), initial=int(first)))
    equations = [f"{total}{step}={then};" for (total, then), step in zip(pairwise(totals), steps, strict=True)]
    return "".join(equations) + f"#{totals[-1]}"


def asked(fields: Fields) -> str:
    return fields["prompt"] if "prompt" in fields else fields["messages"][-1]["content"]


def chat(text: str | None, logp: float = -0.25, end: bool = True, **changes: Any) -> Fields:
    """A whole answer of the chat API, a token for each character and one for the end of turn."""
    tokens = [*(text or ""), *(["<end>"] if end else [])]
    content = [{"token": token, "bytes": list(token.encode(errors="replace")), "logprob": logp} for token in tokens]
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop", "stop_reason": None}
    return {
        "choices": [{**choice, "logprobs": {"content": content}, **changes}],
        "usage": {"prompt_tokens": 9, "completion_tokens": len(tokens)},
    }


def completion(text: str, logp: float = -0.25, **changes: Any) -> Fields:
    """A whole answer of the completions API."""
    tokens = [*text, "<end>"]
    logprobs = {"tokens": tokens, "token_logprobs": [logp] * len(tokens)}
    return {
        "choices": [{"text": text, "finish_reason": "stop", "stop_reason": None, "logprobs": logprobs, **changes}],
        "usage": {"prompt_tokens": 9, "completion_tokens": len(tokens)},
    }


def right(fields: Fields) -> Fields:
    """The right answer, the same to every request."""
    return (completion if "prompt" in fields else chat)(worked(asked(fields)))


Reply = Callable[[Fields], Response | Fields]


class Teacher:
    """The server. `reply` says what it answers from the next request on; greedy requests get the right answer."""

    def __init__(self, reply: Reply = right) -> None:
        self.reply, self.greedy = reply, right
        self.requests: list[Fields] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.released = threading.Event()
        teacher = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                fields = json.loads(self.rfile.read(int(self.headers["content-length"])))
                teacher.times.append(time.monotonic())
                teacher.requests.append(fields)
                teacher.paths.append(self.path)
                teacher.headers.append({name.lower(): value for name, value in self.headers.items()})
                reply = (teacher.greedy if fields["temperature"] == 0 else teacher.reply)(fields)
                response = reply if isinstance(reply, Response) else Response(json.dumps(reply).encode())
                teacher.released.wait(response.wait)
                self.send_response(response.status)
                for name, value in response.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(response.body)))
                self.end_headers()
                self.wfile.write(response.body[: len(response.body) - response.cut])
                self.close_connection = bool(response.cut)

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *args: Any) -> None:
                pass  # the client may have gone

        self.server = Server(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    @property
    def sampled(self) -> list[Fields]:
        """Requests of steps: those that are not greedy."""
        return [fields for fields in self.requests if fields["temperature"]]

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()
