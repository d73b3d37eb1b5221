"""`headrace chat` against a fake server over real HTTP: streams, converses, and explains every failure in one line."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from services.cli.main import main
from tests.cli.conftest import Shell
from tests.ports import free_port
from tests.waiting import PATIENCE_S


class FakeServer(ThreadingHTTPServer):
    """Answers chats with `pieces`; remembers what it was asked. `status` other than 200 is an error envelope."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pieces = ["Kuber", "netes", " is"]
        self.status = 200
        self.error: object = {"error": {"message": "the model is busy", "type": "server_error", "code": "no_capacity"}}
        self.tail = ["[DONE]"]
        self.hang = False
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.left = threading.Event()
        """Set when a client went away in the middle of an answer."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["Authorization"])
        self._answer(200, {"object": "list", "data": [{"id": "fake-model"}, {"id": "other"}]})

    def do_POST(self) -> None:
        self.server.keys.append(self.headers["Authorization"])
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.server.status != 200:
            self._answer(self.server.status, self.server.error)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for piece in self.server.pieces:
            self._event(json.dumps({"choices": [{"index": 0, "delta": {"content": piece}}]}))
        while self.server.hang:
            time.sleep(0.01)
            try:
                self._event(json.dumps({"choices": []}))
            except OSError:
                self.server.left.set()
                return
        for text in self.server.tail:
            self._event(text)

    def _event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def _answer(self, status: int, body: object) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if status == 503:
            self.send_header("Retry-After", "2")
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    server = FakeServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    monkeypatch.setenv("HEADRACE_URL", server.url)
    yield server
    server.hang = False
    server.shutdown()
    server.server_close()


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """`headrace chat` as a program in a pipe."""
    argv = [sys.executable, "-m", "services.cli.main", "chat", *arguments]
    return subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=30, check=False)


def test_one_question(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "What is", "Kubernetes?"]) == 0
    assert capsys.readouterr() == ("Kubernetes is\n", "")
    assert server.asked == [
        {"model": "fake-model", "messages": [{"role": "user", "content": "What is Kubernetes?"}], "stream": True}
    ]


def test_parameters_are_sent(server: FakeServer) -> None:
    assert main(["chat", "hi", "--model", "m", "--max-tokens", "3", "--temperature", "0", "--seed", "7"]) == 0
    assert server.asked[0] | {"messages": []} == {
        "model": "m",
        "messages": [],
        "stream": True,
        "max_tokens": 3,
        "temperature": 0.0,
        "seed": 7,
    }


def test_the_key_is_sent_where_there_is_one(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    assert main(["chat", "hi"]) == 0
    monkeypatch.setenv("HEADRACE_API_KEY", "hr-key")
    assert main(["chat", "hi"]) == 0
    assert server.keys == [None, None, "Bearer hr-key", "Bearer hr-key"]


@pytest.mark.parametrize("key", ["ü", "a\nb"])
def test_a_key_that_is_none(key: str, headrace: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", key)
    assert "HEADRACE_API_KEY is no key" in headrace("chat", "hi", code=1)


def test_a_conversation_in_a_pipe_keeps_its_history(server: FakeServer) -> None:
    done = run(stdin="first\nsecond\n")
    assert (done.returncode, done.stdout, done.stderr.strip()) == (0, "Kubernetes is\n" * 2, "")
    assert [message["content"] for message in server.asked[1]["messages"]] == ["first", "Kubernetes is", "second"]
    assert [message["role"] for message in server.asked[1]["messages"]] == ["user", "assistant", "user"]


def test_an_empty_line_ends_the_conversation(server: FakeServer) -> None:
    done = run(stdin="first\n\nnever asked\n")
    assert done.returncode == 0
    assert len(server.asked) == 1


def test_nothing_listens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("HEADRACE_URL", url)
    assert main(["chat", "hi"]) == 1
    assert capsys.readouterr().err == f"headrace: nothing answers at {url}: start Headrace with `make up`, or set HEADRACE_URL\n"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:y", "nonsense"])
def test_an_address_that_is_none(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HEADRACE_URL", url)
    assert main(["chat", "hi"]) == 1
    assert "HEADRACE_URL is not an address" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "error", "shown"),
    [
        (503, {"error": {"message": "the model is busy"}}, "the model is busy (try again in 2 s)"),
        (400, {"error": {"message": "too long", "param": "messages"}}, "too long"),
        (502, b"<html>Bad Gateway</html>", "the server answered 502 Bad Gateway"),
        (500, {"detail": "other"}, "the server answered 500 Internal Server Error"),
    ],
)
def test_an_error_envelope_is_shown(
    status: int, error: object, shown: str, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status, server.error = status, error
    assert main(["chat", "hi"]) == 1
    assert capsys.readouterr() == ("", f"headrace: {shown}\n")


@pytest.mark.parametrize(
    ("tail", "shown"),
    [
        ([], "the answer broke off"),
        (['{"error": {"message": "a worker died"}}'], "a worker died"),
        (["not json"], "something that is no answer"),
        (["[1]"], "something that is no answer"),
        (['{"choices": [5]}'], "something that is no answer"),
        (['{"choices": [{"delta": null}]}'], "something that is no answer"),
        (["[" * 100_000], "something that is no answer"),
    ],
)
def test_an_answer_that_breaks_off_is_no_success(
    tail: list[str], shown: str, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.tail = tail
    assert main(["chat", "hi"]) == 1
    out, err = capsys.readouterr()
    assert out == "Kubernetes is\n"
    assert shown in err


def test_a_reader_that_has_enough_is_no_error(server: FakeServer) -> None:
    server.pieces = ["x" * 1000 + "\n"] * 500
    command = f"{sys.executable} -m services.cli.main chat hi; echo code $? >&2"
    done = subprocess.run(["bash", "-c", f"({command}) | head -n 1"], capture_output=True, text=True, timeout=30, check=False)
    assert done.stderr == "code 0\n"


def test_ctrl_c_stops_the_answer_and_not_the_conversation(server: FakeServer) -> None:
    """In a terminal: an answer without end, Ctrl-C, another question, Ctrl-D."""
    server.hang = True
    here, there = pty.openpty()
    # Whoever runs the tests in the background may have them ignore SIGINT, which a child would take over.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    argv = [sys.executable, "-c", f"{heard}; from services.cli.main import main; raise SystemExit(main(['chat']))"]
    with subprocess.Popen(argv, stdin=there, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as chat:
        os.close(there)
        assert chat.stdout is not None
        try:
            os.write(here, b"first\n")
            _read_until(chat.stdout.fileno(), b" is")
            chat.send_signal(signal.SIGINT)
            assert server.left.wait(PATIENCE_S)
            server.hang = False
            os.write(here, b"second\n")
            _read_until(chat.stdout.fileno(), b" is\n")
            os.write(here, b"\x04")
            assert chat.wait(PATIENCE_S) == 0
        finally:
            chat.kill()
            os.close(here)
    assert [message["content"] for message in server.asked[1]["messages"]] == ["first", "Kubernetes is", "second"]


def _read_until(descriptor: int, text: bytes) -> bytes:
    seen = b""
    while not seen.endswith(text):
        data = os.read(descriptor, 1)
        assert data, seen
        seen += data
    return seen
