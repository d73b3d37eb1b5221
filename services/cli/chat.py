"""`headrace chat`: a question, or a conversation, over the HTTP API like any other client.

Knows a URL and nothing of this machine's Headrace. The answer goes to standard output, everything else to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from services.cli.failure import CommandError
from services.cli.sse import events

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT = httpx.Timeout(connect=5.0, write=10.0, pool=5.0, read=300.0)
"""`read`: between two pieces of an answer; a queued question may wait for its first one."""

Message = dict[str, str]


def run(arguments: argparse.Namespace) -> int:
    """The exit code. Raises `CommandError`; KeyboardInterrupt when a single question is stopped."""
    url = _url()
    asked = {name: getattr(arguments, name) for name in ("max_tokens", "temperature", "seed")}
    try:
        with httpx.Client(base_url=url, headers=_key(), timeout=TIMEOUT) as http:
            server = Server(http, arguments.model, {name: value for name, value in asked.items() if value is not None})
            if arguments.prompt:
                show(server.answer([{"role": "user", "content": " ".join(arguments.prompt)}]))
            else:
                converse(server, terminal=sys.stdin.isatty())
    except BrokenPipeError:  # whoever read our answer has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


@dataclass(slots=True)
class Server:
    """The API behind an HTTP client. Every failure is a `CommandError` of one line."""

    http: httpx.Client
    model: str | None
    parameters: dict[str, int | float] = field(default_factory=dict)

    def answer(self, messages: list[Message]) -> Iterator[str]:
        """The pieces of the answer as they come."""
        body = {"model": self._model(), "messages": messages, "stream": True, **self.parameters}
        try:
            with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
                _check(response)
                yield from _pieces(response)
        except httpx.HTTPError as error:
            raise _unreachable(self.http, error) from None

    def _model(self) -> str:
        if self.model is None:
            try:
                response = self.http.get("/v1/models")
                _check(response)
                self.model = str(response.json()["data"][0]["id"])
            except httpx.HTTPError as error:
                raise _unreachable(self.http, error) from None
            except (ValueError, LookupError, TypeError):
                raise CommandError(f"{self.http.base_url} lists no model; name one with --model") from None
        return self.model


def converse(server: Server, *, terminal: bool) -> None:
    """Questions and answers until an empty line or the end of the input. Ctrl-C stops the answer, not the conversation."""
    if terminal:
        print("An empty line ends the conversation, Ctrl-C an answer.", file=sys.stderr)
    history: list[Message] = []
    while question := _question(terminal):
        history.append({"role": "user", "content": question})
        try:
            said = show(server.answer(history))
        except CommandError as error:
            if not terminal:
                raise
            print(f"headrace: {error}", file=sys.stderr)
            history.pop()
            continue
        history.append({"role": "assistant", "content": said})


def show(pieces: Iterator[str]) -> str:
    """Print the pieces as they come; all of them together. Ctrl-C ends the answer with what was said so far."""
    said: list[str] = []
    try:
        for piece in pieces:
            said.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]
    finally:
        if said:
            print(flush=True)
    return "".join(said)


def _url() -> httpx.URL:
    text = os.environ.get("HEADRACE_URL") or DEFAULT_URL
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        url = httpx.URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise CommandError(f"HEADRACE_URL is not an address: {text!r}; an example is {DEFAULT_URL}")
    return url


def _key() -> dict[str, str]:
    key = os.environ.get("HEADRACE_API_KEY", "")
    if not key.isascii() or not key.isprintable():
        raise CommandError("HEADRACE_API_KEY is no key: it has characters that none has")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _question(terminal: bool) -> str:
    try:
        line = input("> ") if terminal else sys.stdin.readline()
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)
        return ""
    return line.strip()


def _pieces(response: httpx.Response) -> Iterator[str]:
    for data in events(response.iter_lines()):
        if data == "[DONE]":
            return
        try:
            chunk = json.loads(data)
            said = [choice["delta"].get("content") for choice in chunk.get("choices") or ()]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            raise CommandError(f"the server sent something that is no answer: {data[:80]}") from None
        if "error" in chunk:
            raise CommandError(_message(chunk, "the answer broke off"))
        yield from (piece for piece in said if isinstance(piece, str) and piece)
    raise CommandError("the answer broke off: the server closed the connection before its end")


def _check(response: httpx.Response) -> None:
    """Raises `CommandError` with the words of the server's error envelope."""
    if response.is_success:
        return
    response.read()
    fallback = f"the server answered {response.status_code} {response.reason_phrase}"
    try:
        message = _message(response.json(), fallback)
    except ValueError:
        message = fallback
    after = response.headers.get("retry-after")
    raise CommandError(f"{message} (try again in {after} s)" if after else message)


def _message(body: Any, fallback: str) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else fallback


def _unreachable(http: httpx.Client, error: httpx.HTTPError) -> CommandError:
    where = str(http.base_url).rstrip("/")
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return CommandError(f"nothing answers at {where}: start Headrace with `make up`, or set HEADRACE_URL")
    if isinstance(error, httpx.TimeoutException):
        return CommandError(f"{where} took too long to answer")
    return CommandError(f"the connection to {where} broke off: {error or type(error).__name__}")
