"""`prompt` of `/v1/completions`: a string, token ids, or a list of either. Shapes and ranges only; pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schemas.errors import EmptyArray, InvalidRequest

Prompt = str | Sequence[int]


def read_prompts(value: Any, most: int, vocabulary: int) -> list[Prompt]:
    """One or several prompts, at most `most`; ids are below `vocabulary`. Raises `InvalidRequest` that names the place."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise InvalidRequest("'prompt' must be a string, an array of strings, or token ids.", param="prompt")
    if not value:
        raise EmptyArray("'prompt' must not be empty.", param="prompt")
    if _is_id(value[0]):
        return [read_ids(value, "prompt", vocabulary)]
    if len(value) > most:
        raise InvalidRequest(f"'prompt' may hold at most {most} prompts.", param="prompt")
    return [_one(item, f"prompt[{index}]", vocabulary) for index, item in enumerate(value)]


def _one(value: Any, param: str, vocabulary: int) -> Prompt:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest("A prompt must be a string or an array of token ids.", param=param)
    if not value:
        raise EmptyArray("A prompt must not be empty.", param=param)
    return read_ids(value, param, vocabulary)


def read_ids(value: list[Any], param: str, vocabulary: int) -> list[int]:
    """Token ids below `vocabulary`. Raises `InvalidRequest` that names the first that is none."""
    wrong = next((index for index, item in enumerate(value) if not (_is_id(item) and 0 <= item < vocabulary)), None)
    if wrong is not None:
        raise InvalidRequest(f"Token ids are integers from 0 to {vocabulary - 1}.", param=f"{param}[{wrong}]")
    return value


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
