"""The grammars an engine can keep to: those that compile for its model's vocabulary.

Read when the engine is built, because reading holds the GIL for half a second; a model whose tokenizer llguidance cannot use is
served without grammars.
"""

from __future__ import annotations

import logging

from services.models.store import ModelFiles
from services.text.grammar import KINDS, model_vocabulary
from services.text.grammar_cache import GrammarCache

_log = logging.getLogger(__name__)


def read_grammars(files: ModelFiles, vocab_size: int, eos_ids: frozenset[int]) -> GrammarCache | None:
    """`vocab_size`: ids a row of logits has. None: this engine offers no grammars."""
    try:
        tokenizer = files.tokenizer.read_text(encoding="utf-8")
        return GrammarCache(model_vocabulary(tokenizer, vocab_size, eos_ids))
    except (OSError, ValueError) as error:
        _log.warning("%s is served without constrained output: %s", files.name, error)
        return None


def kinds(grammars: GrammarCache | None) -> tuple[str, ...]:
    """As `Capabilities.grammar` names them."""
    return KINDS if grammars is not None else ()
