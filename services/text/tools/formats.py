"""Which format a model writes its calls in: told by its chat template, because nothing else in a model's files says it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from services.text.tools.grammar import HERMES, LLAMA3, CallSyntax
from services.text.tools.hermes import HermesParser
from services.text.tools.llama3 import Llama3Parser
from services.text.tools.parser import ToolParser


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`parser`: for one choice, given the names that may be called."""

    syntax: CallSyntax
    parser: Callable[[Collection[str]], ToolParser]


FORMATS = {
    "hermes": ToolFormat(HERMES, lambda _: HermesParser()),
    "llama3": ToolFormat(LLAMA3, Llama3Parser),
}
"""The seam for further formats."""


def tool_format(template: str) -> ToolFormat:
    """Llama 3's templates ask for "parameters" or speak of `<|python_tag|>`; any other model is asked to write Hermes'."""
    llama = "<tool_call>" not in template and ("<|python_tag|>" in template or '"parameters": dictionary' in template)
    return FORMATS["llama3" if llama else "hermes"]
