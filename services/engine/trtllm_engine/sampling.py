"""How a run's tokens are drawn, as TensorRT-LLM's `SamplingParams`: a fresh object each time, because the engine writes into it.

Pure. What 1.2.1 would accept and ignore is not passed at all (see `capabilities`). Nothing set means greedy there.
"""

from __future__ import annotations

from typing import Any

import msgspec

from schemas.job import Grammar, Sampling
from services.engine.trtllm_engine.api import Api


def sampling_params(api: Api, sampling: Sampling, generated: int, eos_ids: frozenset[int]) -> Any:
    """For a choice that has `generated` tokens already. Raises what TensorRT-LLM's own checks raise: ValueError, TypeError."""
    end, *more = sorted(eos_ids)
    stops = [*([] if sampling.ignore_eos else more), *sampling.stop_token_ids]
    given: dict[str, Any] = {
        "end_id": end,  # without a tokenizer it must be said
        "pad_id": end,
        "max_tokens": sampling.max_tokens - generated,
        "ignore_eos": sampling.ignore_eos,
        "detokenize": False,
    }
    if sampling.min_tokens > generated:
        given["min_tokens"] = sampling.min_tokens - generated
    if stops:
        given["stop_token_ids"] = stops
    if sampling.temperature > 0.0:
        given |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        if sampling.top_k:
            given["top_k"] = sampling.top_k
    if sampling.grammar is not None:
        given["guided_decoding"] = api.guided_decoding(**_guide(sampling.grammar))
    return api.sampling_params(**given)


def canary_params(api: Api, eos_ids: frozenset[int]) -> Any:
    """One token, whatever it is."""
    end = min(eos_ids)
    return api.sampling_params(end_id=end, pad_id=end, max_tokens=1, ignore_eos=True, detokenize=False)


def _guide(grammar: Grammar) -> dict[str, Any]:
    """At most one of its fields may be set."""
    match grammar.kind:
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            return {"json": msgspec.json.decode(grammar.source)}
        case "regex":
            return {"regex": grammar.source}
        case other:
            raise ValueError(f"no grammar of kind {other}")
