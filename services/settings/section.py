"""What sections are made of: their base, and the kinds of value that several of them hold.

Invariant: no number is so large that a timer or a message could not take it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

LONGEST_S = 1e7
"""Seconds, four months: no delay of ours is longer, and every timer takes it."""
LARGEST = 2**31 - 1
"""No count of ours is larger, so that each fits into any message."""
TextOrPath = TypeVar("TextOrPath", str, Path)


def no_flag(value: Any) -> Any:
    """`value`. Raises ValueError for true and false, which pydantic takes for the numbers 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("true and false are no value of this")
    return value


class Section(BaseModel):
    """One table of `headrace.toml`: a key that it does not name is an error, and nobody changes it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag(cls, value: Any, info: ValidationInfo) -> Any:
        meant = cls.model_fields[str(info.field_name)].annotation
        return value if bool in (meant, *get_args(meant)) else no_flag(value)


def resolvable(host: str) -> str:
    """`host`. Raises ValueError where the resolver would."""
    host.encode("idna")  # raises UnicodeError, a ValueError
    return host


def at_home(path: TextOrPath) -> TextOrPath:
    """`path`. Raises ValueError for a home folder that nobody has."""
    try:
        Path(path).expanduser()
    except RuntimeError as error:  # of ~nobody
        raise ValueError(str(error)) from None
    return path


Seconds = Annotated[float, Field(gt=0, le=LONGEST_S)]
Host = Annotated[str, AfterValidator(resolvable)]
