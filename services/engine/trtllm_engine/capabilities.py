"""What TensorRT-LLM 1.2.1 does, not what it accepts: the edge refuses the rest by name.

Its default sampler ignores penalties (NVIDIA/TensorRT-LLM#9442, fixed in PR 16485) and a request's seed (PR 17172). In
disaggregation n must be 1, and a context response's log-probabilities do not reach decode (PR 11727). What no source settles
(min_p, biases) is not offered. Grammars are, when their backend is configured.
"""

from __future__ import annotations

from schemas.state import Capabilities
from services.settings.trtllm import TrtllmSettings

GRAMMARS = ("json_object", "json_schema", "regex")
"""Not free grammars: their syntax here is llguidance's, which xgrammar does not read."""


def capabilities(settings: TrtllmSettings) -> Capabilities:
    """`must_hand_off`: what prefill has handed off is consumed, whatever became of the client, so it is not cancelled there."""
    return Capabilities(
        top_k=True,
        grammar=GRAMMARS if settings.guided_decoding else (),
        cancel_during_handoff=False,
        must_hand_off=True,
        adapters=tuple(sorted(settings.adapters)),
    )
