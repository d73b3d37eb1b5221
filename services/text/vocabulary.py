"""Token id → the bytes it stands for: what makes detokenising a table look-up.

Two families cover the models we serve: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) and SentencePiece with byte fallback
(Llama 2, Mistral, Gemma). A decoder of any other kind is refused: guessed bytes would be wrong text.
Sources: https://github.com/openai/gpt-2/blob/master/src/encoder.py (bytes_to_unicode); tokenizers' decoders ByteLevel and
ByteFallback.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from services.text.assets import TextError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
"""SentencePiece writes a space as this character."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`bytes_of` has b"" for special tokens; an id that is missing is none of this tokenizer's.

    `strips_space`: a space at the very start of a text is an artefact of the tokenizer, not part of the text.
    """

    bytes_of: dict[int, bytes]
    special: frozenset[int]
    strips_space: bool


def read_vocabulary(tokenizer: str) -> Vocabulary:
    """The table of a tokenizer.json. Raises `TextError` for a decoder of another family or a damaged file."""
    try:
        content = json.loads(tokenizer)
        pieces: dict[int, str] = _pieces(content["model"]["vocab"])
        added = {item["id"]: item["content"] for item in content["added_tokens"]}
        special = frozenset(item["id"] for item in content["added_tokens"] if item["special"])
        decoders = _flat(content["decoder"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TextError(f"tokenizer.json is damaged or of an unknown kind: {error!r}") from None
    kinds = [decoder.get("type") for decoder in decoders]
    if kinds == ["ByteLevel"]:
        alphabet = byte_alphabet()
        table = {index: _byte_level(piece, alphabet) for index, piece in pieces.items()}
        strips = False
    elif "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        table = {index: _sentencepiece(piece) for index, piece in pieces.items()}
        strips = "Strip" in kinds
    else:
        raise TextError(f"tokenizer.json has decoder {kinds}; only byte-level and byte-fallback tokenizers are supported")
    table |= {index: content.encode() for index, content in added.items()}
    table |= dict.fromkeys(special, b"")
    return Vocabulary(table, special, strips)


def byte_alphabet() -> dict[str, int]:
    """The printable character by which byte-level BPE writes each of the 256 bytes, and that byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


def _byte_level(piece: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes([alphabet[character] for character in piece])
    except KeyError:  # a piece that was never byte-level is its own text
        return piece.encode()


def _sentencepiece(piece: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(piece):
        return bytes.fromhex(match[1])
    return piece.replace(_SPACE, " ").encode()


def _pieces(vocab: Any) -> dict[int, str]:
    """BPE writes {piece: id}, Unigram writes [[piece, score], …] in the order of ids."""
    if isinstance(vocab, dict):
        return {index: piece for piece, index in vocab.items()}
    return {index: piece for index, (piece, _) in enumerate(vocab)}


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
