"""The text side of the served model: messages to prompt ids, a text stream for each answer, grammars that can be followed.

Owns a small pool of threads for long prompts: tokenising them on the event loop would hold up every stream of this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from schemas.errors import InvalidRequest
from schemas.job import Grammar
from services.clock import Clock
from services.models.errors import ModelError
from services.text.assets import GenerationDefaults, TextError, read_assets
from services.text.grammar import BadGrammar, byte_vocabulary
from services.text.grammar_cache import GrammarCache
from services.text.prompt import PromptEncoder
from services.text.stream import TextStream
from services.text.template import NO_VARIABLES, ChatTemplate
from services.text.tokenizer import Tokenizer
from services.text.tools.formats import ToolFormat
from services.text.tools.grammar import Function

INLINE_CHARACTERS = 4096
"""About a millisecond of work; more goes to a thread."""
_PER_MESSAGE = 16
"""Characters that a message costs beside its text."""
_THREADS = 2
T = TypeVar("T")
_CALLED = {"json_object": "format", "json_schema": "schema", "regex": "pattern", "grammar": "grammar"}


class TextModel:
    def __init__(self, name: str, tokenizer: Tokenizer, template: ChatTemplate, defaults: GenerationDefaults) -> None:
        self.name = name
        self.defaults = defaults
        self._tokenizer = tokenizer
        self._vocabulary = tokenizer.size
        self._template = template
        self._encoder = PromptEncoder(tokenizer, template)
        self._grammars = GrammarCache(byte_vocabulary())
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenise")

    @classmethod
    def load(cls, name: str, folder: Path, clock: Clock) -> TextModel:
        """Raises `ModelError`."""
        try:
            assets = read_assets(folder)
            return cls(name, Tokenizer(assets), ChatTemplate(assets, clock), assets.generation)
        except TextError as error:
            raise ModelError(f"the model {name} cannot be served: {error}") from None

    @property
    def vocabulary(self) -> int:
        """How many token ids there are."""
        return self._vocabulary

    @property
    def tool_format(self) -> ToolFormat:
        """How this model writes calls."""
        return self._template.tool_format

    async def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        functions: Sequence[Function] = (),
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> list[int]:
        """The prompt's ids; `functions` may be called; `variables`: of the template. Raises `InvalidRequest`."""
        size = INLINE_CHARACTERS + 1 if functions or variables else sum(map(_characters, messages))
        return await self._by_size(size, lambda: self._encoder.encode(messages, functions, variables))

    async def encode_text(self, text: str) -> list[int]:
        """The ids of a raw prompt: special tokens spelled in it are such, and the model's own opening comes first.

        Raises `InvalidRequest`.
        """
        return await self._by_size(len(text), lambda: self._tokenizer.encode_prompt(text))

    async def decode_any(self, ids: Sequence[int]) -> str:
        """The text of `ids`, however many, special tokens spelled."""
        return await self._by_size(len(ids), lambda: self._tokenizer.spell_all(ids))

    async def spellings(self, ids: Sequence[int]) -> list[str]:
        """The text of each of `ids` by itself."""
        return await self._by_size(len(ids), lambda: [self._tokenizer.spell(token)[0] for token in ids])

    def stream(self, stops: Sequence[str] = (), *, keep_stop: bool = False) -> TextStream:
        """A fresh text stream for one choice. `keep_stop`: the stop string that ends the text stays in it."""
        return TextStream(self._tokenizer, stops, keep_stop=keep_stop)

    def spell(self, token: int) -> tuple[str, bytes | None]:
        """A token's text and its bytes, None for a special token."""
        return self._tokenizer.spell(token)

    async def must_compile(self, grammar: Grammar, param: str) -> None:
        """Raises `InvalidRequest`, which names `param`, for a grammar that no worker could follow."""
        compiled = await self._grammars.get(grammar)
        if isinstance(compiled, BadGrammar):
            text = f"The {_CALLED[grammar.kind]} in '{param}' cannot be used: {compiled.reason.rstrip('.')}."
            raise InvalidRequest(text, param=param)

    async def _by_size(self, size: int, work: Callable[[], T]) -> T:
        """`work` here, or in a thread when its input is large."""
        if size <= INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()


def _characters(message: Mapping[str, Any]) -> int:
    """About how much there is to render and to encode."""
    content = message.get("content")
    if message.get("tool_calls"):
        return INLINE_CHARACTERS
    if isinstance(content, list):
        return _PER_MESSAGE + sum(_PER_MESSAGE + len(part.get("text", "")) for part in content)
    return _PER_MESSAGE + (len(content) if isinstance(content, str) else 0)
