"""Text ↔ token ids of one model.

Owns the `tokenizers` object and the byte table. Immutable once made, so any thread may use it; `encode` releases the GIL, and
a caller with long text runs it in a thread. Adds no token of its own: a BOS is there when the template wrote one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import tokenizers

from schemas.errors import InvalidRequest
from services.text.assets import TextAssets, TextError, read_assets
from services.text.detokenize import Detokenizer
from services.text.vocabulary import read_vocabulary


class Tokenizer:
    """Raises `TextError` when `assets` hold no tokenizer that we can decode."""

    def __init__(self, assets: TextAssets) -> None:
        self._source = assets.tokenizer
        self._vocabulary = read_vocabulary(assets.tokenizer)
        self._whole = _build(assets.tokenizer)
        self.eos_ids = assets.eos_ids
        self.special_tokens: dict[str, int] = {
            token.content: index
            for index, token in self._whole.get_added_tokens_decoder().items()
            if index in self._vocabulary.special
        }

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """The tokenizer of the model in `folder` (Hugging Face layout). Raises `TextError`."""
        return cls(read_assets(folder))

    @property
    def size(self) -> int:
        """The number of ids, added tokens included."""
        return int(self._whole.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; special tokens spelled in it become control tokens. Raises `InvalidRequest`."""
        return _encode(self._whole, text)

    def encode_prompt(self, text: str) -> list[int]:
        """As `encode`, with what the tokenizer itself puts around a text (`<s>` for Llama). Raises `InvalidRequest`."""
        return _encode(self._whole, text, whole_text=True)

    def encode_plain(self, text: str) -> list[int]:
        """The ids of `text` taken literally: a special token spelled in it is encoded as ordinary characters."""
        return _encode(self._plain, text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, exactly what streaming them would give."""
        return self.detokenizer().push(ids)

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental detokeniser for one sequence."""
        return Detokenizer(self._vocabulary)

    def token_bytes(self, token: int) -> bytes:
        """The bytes `token` stands for; empty for special tokens and for ids that are none of ours."""
        return self._vocabulary.bytes_of.get(token, b"")

    def spell(self, token: int) -> tuple[str, bytes | None]:
        """`token` by itself, bytes that are no text as \\x escapes, and its bytes: None for special tokens and unknown ids."""
        data = self.token_bytes(token)
        if not data:
            return self._names.get(token, ""), None
        return data.decode("utf-8", "backslashreplace"), data

    def spell_all(self, ids: Iterable[int]) -> str:
        """The text of `ids` with special tokens spelled: the way back from `encode`."""
        special, detokenizer, text = self._names, self.detokenizer(), ""
        for token in ids:
            text += special.get(token) or detokenizer.push((token,))
        return text

    @cached_property
    def _names(self) -> dict[int, str]:
        return {token: spelling for spelling, token in self.special_tokens.items()}

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Matches any special token, the longest first; nothing when the model has none."""
        spellings = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, spellings)) or r"(?!)")

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A second object, because the switch is one of the whole object; made when first needed, which is rare."""
        plain = _build(self._source)
        plain.encode_special_tokens = True
        return plain


def _build(source: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(source)
    except Exception as error:  # the library raises bare Exceptions
        raise TextError(f"tokenizer.json cannot be loaded: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _encode(tokenizer: tokenizers.Tokenizer, text: str, *, whole_text: bool = False) -> list[int]:
    try:
        (encoded,) = tokenizer.encode_batch_fast([text], add_special_tokens=whole_text)  # `encode` would hold the GIL
    except TypeError:  # the library's word for a str with lone surrogates
        raise InvalidRequest("The text is not valid Unicode.") from None
    return list(encoded.ids)
