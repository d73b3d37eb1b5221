"""Messages → prompt ids, such that nothing a client writes becomes a control token.

A client may type `<|im_end|>`. Encoded as the token, it would end its own turn and open one of the system's. Invariant: control
tokens in a prompt come from the model's template only, and a prompt in which no client text spells one has exactly the ids
that Hugging Face gives.

The second half holds by construction: such a prompt is rendered and encoded whole, as Hugging Face does. Otherwise the first
character of each spelled token is replaced, before rendering, by a private character that stands for it and that no message
uses. Whatever the template does with the text (trim, split, repeat), a control token found in the result is the template's
own. The text between control tokens is then restored and encoded literally, piece by piece. Tokenizers that treat the first
piece of a text differently (SentencePiece's leading space) may split white space after a control token differently then.
Control tokens are those that tokenizer.json calls special. Out of reach: a template that glues its own characters to a client's
such that the two together spell one, and tokenizers that recognise special tokens only after normalising the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from schemas.errors import InvalidRequest
from services.text.template import NO_VARIABLES, ChatTemplate, Message, plain_messages
from services.text.tokenizer import Tokenizer
from services.text.tools.grammar import Function
from services.text.tools.messages import in_plain_words, with_parsed_arguments

_PRIVATE = range(0xF0000, 0x10FFFE)
"""Unicode's supplementary private use planes: one token or more each, so no prompt that fits a context uses them all."""


class PromptEncoder:
    """The chat prompts of one model. Holds no state; may be used from any thread."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._special = tokenizer.special_pattern
        # Looks ahead only, so that tokens are also found where they overlap; matches their first character.
        self._opening = re.compile(f"(?s)(?={self._special.pattern}).")

    def encode(
        self,
        messages: Sequence[Message],
        functions: Sequence[Function] = (),
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> list[int]:
        """The prompt's ids, open for the assistant's turn; `functions` may be called; `variables`: as `ChatTemplate.render`.

        Raises `InvalidRequest`.
        """
        given: list[Any] = [*self._with_tools(plain_messages(messages), functions), variables]
        if not any(self._special.search(text) for text in _strings(given)):
            return self._tokenizer.encode(self._template.render(*given))
        stand_ins = self._stand_ins(given)
        given = _map_strings(given, lambda text: self._opening.sub(lambda match: stand_ins[match[0]], text))
        return self._encode_pieces(self._template.render(*given), stand_ins)

    def _with_tools(self, plain: list[dict[str, Any]], functions: Sequence[Function]) -> tuple[list[Any], list[Any]]:
        if self._template.knows_tools:
            return with_parsed_arguments(plain), [function.fields() for function in functions]
        return in_plain_words(plain, functions), []

    def _stand_ins(self, messages: Any) -> dict[str, str]:
        """For each first character of a control token, a character that no message uses."""
        used = set().union(*_strings(messages))
        unused = (chr(code) for code in _PRIVATE if chr(code) not in used)
        openings = sorted({token[0] for token in self._tokenizer.special_tokens})
        stand_ins = dict(zip(openings, unused, strict=False))
        if len(stand_ins) < len(openings):
            raise InvalidRequest("The messages use every private character of Unicode.", param="messages")
        return stand_ins

    def _encode_pieces(self, text: str, stand_ins: Mapping[str, str]) -> list[int]:
        """Control tokens as such, what lies between them literally."""
        restore = str.maketrans({stand_in: original for original, stand_in in stand_ins.items()})
        ids: list[int] = []
        start = 0
        for match in self._special.finditer(text):
            ids += self._tokenizer.encode_plain(text[start : match.start()].translate(restore))
            ids.append(self._tokenizer.special_tokens[match[0]])
            start = match.end()
        return ids + self._tokenizer.encode_plain(text[start:].translate(restore))


def _strings(value: Any) -> Iterator[str]:
    """Every string inside `value`, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with every string inside it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_map_strings(item, change) for item in value]
    return value
