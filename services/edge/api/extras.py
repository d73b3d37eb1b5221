"""Fields that change an answer and that nobody here honours: OpenAI's, of other models, and vLLM's, SGLang's, Aphrodite's.

Invariant: none of them is ignored silently. At a value that changes nothing, each is as good as absent; at any other it is
refused by name. Fields that are neither here nor in a request's own class are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schemas.errors import UnsupportedParameter

Neutral = Mapping[str, tuple[Any, ...]]
"""By field: the values that change nothing."""
_NOTHING: tuple[Any, ...] = (None, False, [], {}, "")
_ALL: Neutral = {
    # other ways to search and to filter
    "use_beam_search": _NOTHING,
    "early_stopping": _NOTHING,
    "length_penalty": (None, 1),
    "top_a": (None, 0),
    "tfs": (None, 1),
    "typical_p": (None, 1),
    "bad_words": _NOTHING,
    "allowed_token_ids": _NOTHING,
    "logits_processors": _NOTHING,
    "custom_logit_processor": _NOTHING,
    # other words for `response_format`
    "guided_json": _NOTHING,
    "guided_regex": _NOTHING,
    "guided_choice": _NOTHING,
    "guided_grammar": _NOTHING,
    "structured_outputs": _NOTHING,
    "regex": _NOTHING,
    "ebnf": _NOTHING,
    "json_schema": _NOTHING,
    # what becomes of the prompt
    "truncate_prompt_tokens": (None,),
    "add_generation_prompt": (None, True),
    "continue_final_message": _NOTHING,
    "chat_template": _NOTHING,
    "documents": _NOTHING,
    "lora_path": _NOTHING,
    # what is shown of the tokens
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "stop_regex": _NOTHING,
    "no_stop_trim": _NOTHING,
    "return_tokens_as_token_ids": _NOTHING,
    "return_token_ids": _NOTHING,
}
OF_CHAT: Neutral = {
    **_ALL,
    "echo": _NOTHING,
    "add_special_tokens": (None, False),
    "reasoning_effort": (None, "none"),
    "verbosity": (None, "medium"),
}
OF_TEXT: Neutral = {**_ALL, "add_special_tokens": (None, True), "chat_template_kwargs": _NOTHING}


def refuse_extras(body: Mapping[str, Any], extras: Neutral) -> None:
    """Raises `UnsupportedParameter` for the first that would have to be ignored."""
    for name, value in body.items():
        if name in extras and value not in extras[name]:
            raise UnsupportedParameter(f"'{name}' is not supported.", param=name)
