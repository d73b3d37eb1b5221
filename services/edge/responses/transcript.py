"""From the pieces of an answer to its output items and to the events that tell of them.

Owns the numbering of events. Invariants: sequence numbers depend on the pieces only, so that a reader of the same pieces, now or
on another edge, numbers them the same; the joined deltas of an item are the item; each item that begins ends.
Source: the OpenAI API reference, "Streaming events" of Responses.
"""

from __future__ import annotations

from typing import Any

from schemas.errors import HeadraceError, InvalidRequest
from schemas.reply import FinishReason
from services.edge.api.answer import CallDelta, Piece
from services.edge.api.written import encode
from services.edge.responses.items import Item, said_text
from services.edge.responses.objects import Object

_ENDS = {"completed": "response.completed", "failed": "response.failed"}

UNTOLD = 2**63
"""As `after`: only the output is wanted, and no event is written."""


class Transcript:
    """`name` makes the ids of items. Events up to the number `after` are numbered, and not written."""

    def __init__(self, name: str, after: int = -1) -> None:
        self.output: list[Item] = []
        self.finish: str | None = None
        self._name = name
        self._after = after
        self._next = 0
        self._open = False
        self._unsaid: list[Any] = []
        """Log-probabilities of tokens whose text is held back: it may belong to a call, and a call's are not told."""

    @property
    def cut(self) -> bool:
        """It ended at a limit of tokens."""
        return self.finish == FinishReason.LENGTH

    @property
    def count(self) -> int:
        """Of the events so far, written or not."""
        return self._next

    def begin(self, response: Object) -> bytes:
        """What runs in the background is queued first."""
        running = {**response, "status": "in_progress"}
        if not response["background"]:
            return self._event("response.created", response=running) + self._event("response.in_progress", response=running)
        queued = {**response, "status": "queued"}
        data = self._event("response.created", response=queued) + self._event("response.queued", response=queued)
        return data + self._event("response.in_progress", response=running)

    def take(self, piece: Piece) -> bytes:
        data = b""
        self._unsaid += [entry.fields for entry in piece.logprobs or ()]
        if piece.text or (piece.finish is not None and self._unsaid and not self._calling):
            data += self._say(piece.text)
        for call in piece.calls:
            data += self._call(call)
        if self._calling:
            self._unsaid.clear()
        if piece.finish is not None:
            self.finish = piece.finish
            if not self.output:
                data += self._begin_message()
            data += self._close()
        return data

    def end(self, response: Object) -> bytes:
        """`response`: as it ended. One that was cancelled is told of as incomplete: there is no event of its own for it.

        Whoever waited for an event that never came is told so: a stream of no events would look like one in order.
        """
        data = self._event(_ENDS.get(response["status"], "response.incomplete"), response=response)
        return self._refusal(beyond(self._after, self.count)) if self.count <= self._after < UNTOLD else data

    def break_off(self) -> bytes:
        """Nothing more comes of an answer that has not finished."""
        self.finish = self.finish or FinishReason.LENGTH
        return self._close()

    def _say(self, text: str) -> bytes:
        data = b"" if self._open and not self._calling else self._begin_message()
        part = self._last["content"][0]
        logprobs, self._unsaid = self._unsaid, []
        part["text"] += text
        part["logprobs"] += logprobs
        return data + self._part("response.output_text.delta", delta=text, logprobs=logprobs)

    def _call(self, call: CallDelta) -> bytes:
        data = b""
        if call.name:
            fields = {"call_id": call.id, "name": call.name, "arguments": ""}
            data = self._add({"id": self._item_id("fc"), "type": "function_call", "status": "in_progress", **fields})
        if call.arguments:
            self._last["arguments"] += call.arguments
            data += self._of_item("response.function_call_arguments.delta", delta=call.arguments)
        return data

    def _begin_message(self) -> bytes:
        item: Item = {"id": self._item_id("msg"), "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        data = self._add(item)
        item["content"] = [said_text("")]
        return data + self._part("response.content_part.added", part=said_text(""))

    def _add(self, item: Item) -> bytes:
        data = self._close()
        self.output.append(item)
        self._open = True
        return data + self._event("response.output_item.added", output_index=self._index, item=item)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = False
        item = self._last
        item["status"] = "incomplete" if self.cut else "completed"
        if item["type"] == "message":
            part = item["content"][0]
            data = self._part("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
            data += self._part("response.content_part.done", part=part)
        else:
            said = {"name": item["name"], "arguments": item["arguments"]}
            data = self._of_item("response.function_call_arguments.done", **said)
        return data + self._event("response.output_item.done", output_index=self._index, item=item)

    @property
    def _calling(self) -> bool:
        return bool(self.output) and self._last["type"] == "function_call"

    @property
    def _last(self) -> Item:
        return self.output[-1]

    @property
    def _index(self) -> int:
        return len(self.output) - 1

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._name}{len(self.output):02x}"

    def _part(self, kind: str, **fields: Any) -> bytes:
        return self._of_item(kind, content_index=0, **fields)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._last["id"], output_index=self._index, **fields)

    def _refusal(self, error: HeadraceError) -> bytes:
        about = {"code": error.code, "message": error.message, "param": error.param}
        return _written("error", {**about, "sequence_number": self._next})

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._next = self._next, self._next + 1
        if number <= self._after:
            return b""
        return _written(kind, {"sequence_number": number, **fields})


def beyond(after: int, count: int) -> InvalidRequest:
    """Of a response of `count` events what follows number `after` was wanted."""
    return InvalidRequest(f"'starting_after' is {after}, and the response's last event is {count - 1}.", param="starting_after")


def _written(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **fields}) + b"\n\n"
