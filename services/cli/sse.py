"""Server-sent events out of the lines of a response, as far as the OpenAI API uses them.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation; `event`, `id` and `retry`
are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def events(lines: Iterable[str]) -> Iterator[str]:
    """The data of each event; `lines` come without their line ends. An event that the end of the stream cuts off is dropped."""
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                yield "\n".join(data)
            data = []
        elif line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
