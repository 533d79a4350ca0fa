"""`hacrl export RUN AGENT --push-to-hub`: what is sent to a hub, here a server on this machine, and what goes wrong."""

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from conftest import MakeConfig
from hacrl.errors import UserError
from hacrl.run import train
from hacrl.training.hub import push_agent

CLOSED = "http://127.0.0.1:9"


class Hub(BaseHTTPRequestHandler):
    """The parts of the hub's API that an upload uses; it keeps what it is sent."""

    requests: list[tuple[str, str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.requests.append((self.path, str(self.headers["Authorization"]), body))
        if self.path == "/api/repos/create":
            self.answer({"url": "https://huggingface.co/org/name", "name": "org/name"})
        elif self.path == "/api/models/org/name/preupload/main":
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            self.answer({"files": [{**file, "shouldIgnore": False, "oid": None} for file in files]})
        elif self.path == "/api/models/org/name/commit/main":
            self.answer({"commitUrl": "https://huggingface.co/org/name/commit/0", "commitOid": "0" * 40})
        else:
            self.send_error(404)

    def do_GET(self) -> None:
        self.requests.append((self.path, str(self.headers["Authorization"]), b""))
        self.send_error(404)

    def answer(self, data: dict[str, Any]) -> None:
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.requests = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(make_config: MakeConfig) -> Path:
    return train(make_config(max_steps=1, log_kl=False)).run_dir


def push(run: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hacrl", "export", str(run), *arguments]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    told = {"HF_HOME": str(run / "hub"), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment}
    return subprocess.run(command, env=inherited | told, capture_output=True, text=True, check=False)


def test_one_agents_folder_is_sent_and_nothing_else(run: Path, hub: str) -> None:
    done = push(run, "agent1", "--push-to-hub", "org/name", "--private", HF_ENDPOINT=hub, HF_TOKEN="hf_mine")
    assert done.returncode == 0, done.stderr
    folder = run / "checkpoint-1" / "agents" / "agent1"
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    told = [f"Uploaded {name} ({len(content):,} bytes)" for name, content in files.items()]
    said = [line for line in done.stdout.splitlines() if not line.startswith(("starting, ", "uploading the model, "))]
    assert said == [*told, "See https://huggingface.co/org/name/commit/0"]  # and signs of life, on a busy machine
    assert {authorization for _, authorization, body in Hub.requests if body} == {"Bearer hf_mine"}
    sent = {path: body for path, _, body in Hub.requests if body}
    assert len(sent) == 3
    created = json.loads(sent["/api/repos/create"])
    assert (created["name"], created["organization"], created["visibility"]) == ("name", "org", "private")
    head, *parts = [json.loads(line) for line in sent["/api/models/org/name/commit/main"].splitlines()]
    assert head["value"]["summary"] == "Upload agent1 of checkpoint-1"
    assert {part["value"]["path"]: base64.b64decode(part["value"]["content"]) for part in parts} == files


def test_a_hub_that_cannot_be_reached(run: Path) -> None:
    for environment, said in (({"HF_ENDPOINT": CLOSED}, "ConnectError"), ({"HF_HUB_OFFLINE": "1"}, "offline mode")):
        done = push(run, "agent1", "--push-to-hub", "org/name", HF_TOKEN="hf_mine", **environment)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert "Uploaded" not in done.stdout  # what goes on may stand there if it takes long
        assert "error agent1 could not be uploaded to org/name: " in done.stderr
        assert said in done.stderr


def test_mistakes_are_found_before_anything_is_sent(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(run / "no token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for agent, repo, step, said in (
        ("agent2", "org/name", None, "has no agent 'agent2'; did you mean agent1?"),
        ("agent1", "org/name", 7, "no checkpoint of step 7"),
        ("agent1", "org/name", None, "The hub needs a token that may write: run `hf auth login`, or set HF_TOKEN."),
    ):
        with pytest.raises(UserError) as error:
            push_agent(run, agent, repo, step)
        assert said in str(error.value)
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    with pytest.raises(UserError, match="could not be uploaded to org/na/me: Repo id must be"):
        push_agent(run, "agent1", "org/na/me", None)
