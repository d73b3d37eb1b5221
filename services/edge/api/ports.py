"""What the HTTP layer needs of the rest of the edge; the tests play it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from schemas.explanation import Explanation
from schemas.job import Grammar
from schemas.reply import Logprob
from schemas.state import ModelCard
from services.edge.jobs.draft import Delta, Draft
from services.text.assets import GenerationDefaults
from services.text.stream import Delta as TextDelta
from services.text.template import NO_VARIABLES
from services.text.tools.formats import ToolFormat
from services.text.tools.grammar import Function


class Handle(Protocol):
    """One job; see `services.edge.jobs.handle`."""

    @property
    def id(self) -> str: ...

    @property
    def explanation(self) -> Explanation | None: ...

    @property
    def began(self) -> bool: ...

    @property
    def cached_tokens(self) -> int: ...

    @property
    def compute_s(self) -> float: ...

    @property
    def done(self) -> bool: ...

    @property
    def prompt_logprobs(self) -> Sequence[Logprob]: ...

    async def admitted(self) -> None: ...

    async def next(self, timeout: float) -> list[Delta]: ...

    def cancel(self) -> None: ...

    def stop(self, choice: int) -> None: ...


class Jobs(Protocol):
    """Starts jobs and knows what can be served now."""

    @property
    def connected(self) -> bool: ...

    def start(self, draft: Draft) -> Handle: ...

    def card(self, model: str) -> ModelCard | None: ...

    def retry_after(self, model: str) -> float: ...


class Text(Protocol):
    """The text of one choice; see `services.text.stream`."""

    @property
    def held(self) -> int: ...

    @property
    def unfinished(self) -> bool: ...

    def push(self, ids: Iterable[int]) -> TextDelta: ...

    def finish(self) -> str: ...


class TextModel(Protocol):
    """The text side of the served model."""

    name: str
    defaults: GenerationDefaults

    @property
    def vocabulary(self) -> int: ...

    @property
    def tool_format(self) -> ToolFormat: ...

    async def must_compile(self, grammar: Grammar, param: str) -> None: ...

    async def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        functions: Sequence[Function] = (),
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> list[int]: ...

    async def encode_text(self, text: str) -> list[int]: ...

    async def decode_any(self, ids: Sequence[int]) -> str: ...

    async def spellings(self, ids: Sequence[int]) -> list[str]: ...

    def stream(self, stops: Sequence[str] = (), *, keep_stop: bool = False) -> Text: ...

    def spell(self, token: int) -> tuple[str, bytes | None]: ...
