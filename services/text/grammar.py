"""A grammar as a request gives it → a matcher: which tokens may come next, and whether the text may end here.

Owns llguidance (https://github.com/guidance-ai/llguidance), its options and its limits. Compiling is pure, blocks the caller and
holds no GIL; `grammar_cache` does it off the event loop. Invariant: whatever the source, it ends in bounded time and memory,
fetches nothing, and what it refuses it refuses with a text that may be shown to the caller.

The library is imported where it is used: a worker whose engine keeps to grammars by itself starts without it, or beside a version
that we cannot use (TensorRT-LLM pins 0.7.29).
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from schemas.job import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

KINDS = ("json_object", "json_schema", "regex", "grammar")
MAX_SOURCE = 128 * 1024
"""Characters: OpenAI's own limit for a schema is 120,000."""
_ANY_OBJECT = '{"type":"object"}'
BLANK = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between two tokens of JSON: a model that falls into blanks would fill its whole answer with them."""
_OPTIONS: JsonCompileOptions = {
    "lenient": False,  # a keyword that cannot be enforced is refused, not ignored
    "coerce_one_of": False,
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": BLANK,
}
"""Ours win over a schema's own `x-guidance`."""
_MAX_LEXER_STATES = 16_384
"""1-2 kB each, in every choice that runs."""
_STEPS = 4
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BadGrammar:
    """Why a grammar cannot be used, in words for the caller."""

    reason: str


class CompiledGrammar:
    """The start of a grammar; each choice goes its own way from a copy of it."""

    def __init__(self, start: LLMatcher) -> None:
        self._start = start

    def matcher(self) -> LLMatcher:
        """A fresh one, at the start."""
        return self._start.deep_copy()


def model_vocabulary(tokenizer: str, size: int, eos_ids: frozenset[int]) -> LLTokenizer:
    """The tokens of a model: the content of its tokenizer.json. For 50,000 it takes half a second, the GIL held, and 55 MB.

    `size`: ids a row of logits has. Raises ValueError.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer, n_vocab=size, eos_token=sorted(eos_ids))


def byte_vocabulary() -> LLTokenizer:
    """A vocabulary of the 256 bytes: cheap, and enough to judge a grammar that names no token."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def compile_grammar(grammar: Grammar, vocabulary: LLTokenizer) -> CompiledGrammar | BadGrammar:
    """Takes a millisecond for usual schemas and about a second for the worst found. Raises nothing."""
    from llguidance import LLMatcher, LLParserLimits

    if len(grammar.source) > MAX_SOURCE:
        return BadGrammar(f"it is longer than {MAX_SOURCE} characters")
    try:
        # The parser's state, which verbose errors show, helps nobody outside.
        limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(vocabulary, _text(grammar), log_level=0, limits=limits)
        error = matcher.get_error() or _first_steps(matcher.deep_copy())
    except ValueError as invalid:
        error = str(invalid)
    except BaseException as fault:  # a panic of the library is no Exception, and must stay the matter of one grammar
        if not isinstance(fault, Exception) and type(fault).__name__ != "PanicException":
            raise
        _log.exception("the grammar compiler broke")
        error = "panic"
    return BadGrammar(_shown(error)) if error else CompiledGrammar(matcher)


def _first_steps(matcher: LLMatcher) -> str:
    """What goes wrong when it is used: a schema that only refers to itself, or one with too many ways to go on, fails here."""
    for _ in range(_STEPS):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_stopped():
            break
        matcher.consume_token((allowed & -allowed).bit_length() - 1)
    return matcher.get_error()


def _text(grammar: Grammar) -> str:
    """In llguidance's own form. Raises ValueError."""
    from llguidance import LLMatcher

    match grammar.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema(_ANY_OBJECT, overrides=_OPTIONS)
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.source, overrides=_OPTIONS)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "grammar":
            return LLMatcher.grammar_from_lark(grammar.source)
    raise ValueError(f"unknown kind {grammar.kind[:20]!r}")


def schema_source(schema: dict[str, Any] | bool) -> str:
    """A parsed JSON schema as a grammar's source. Raises ValueError for one that no JSON text can hold."""
    try:
        return json.dumps(schema, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _shown(error: str) -> str:
    """What the library says, cut to one short line that can be printed."""
    if "panic" in error:
        return "it cannot be compiled"
    if "NoExtension" in error:
        return "no text satisfies it"
    line = next((line.strip() for line in error.splitlines() if line.strip()), "it cannot be compiled")
    text = "".join(character if character.isprintable() else " " for character in line)
    return text if len(text) <= 200 else text[:197] + "..."
