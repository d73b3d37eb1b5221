"""How a run becomes a request of TensorRT-LLM: its ids, how tokens are drawn, its adapter, its part of a handoff.

Must not know what becomes of it. Invariants: each request has parameters of its own, because the engine writes into them; the
tenant's salt and the adapter go with it, so that nobody finds another's blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from schemas.errors import InvalidRequest, Unavailable, UnsupportedParameter
from services.engine.protocol import RunSpec
from services.engine.trtllm_engine.api import Api, Llm, Result
from services.engine.trtllm_engine.handoff import OpaqueState
from services.engine.trtllm_engine.sampling import sampling_params

_log = logging.getLogger(__name__)


class Asker:
    """`adapters`: LoRA requests by name. `on_fault`: called with what a request cannot be blamed for."""

    def __init__(
        self, api: Api, llm: Llm, eos_ids: frozenset[int], adapters: Mapping[str, Any], on_fault: Callable[[Exception], None]
    ) -> None:
        self._api = api
        self._llm = llm
        self._eos_ids = eos_ids
        self._adapters = adapters
        self._on_fault = on_fault

    def whole(self, spec: RunSpec) -> Result:
        """Both phases here. Each of these raises `InvalidRequest`, `UnsupportedParameter`, `Unavailable`."""
        return self._ask(spec, None, streaming=True)

    def context(self, spec: RunSpec) -> Result:
        """Its prompt, and a handoff."""
        return self._ask(spec, self._api.disaggregated_params(request_type="context_only"), streaming=False)

    def generation(self, spec: RunSpec, state: OpaqueState) -> Result:
        """What comes after a handoff, which it consumes."""
        params = self._api.disaggregated_params(
            request_type="generation_only",
            first_gen_tokens=list(state.first_gen_tokens),
            ctx_request_id=state.ctx_request_id,
            opaque_state=state.opaque_state,
            draft_tokens=None if state.draft_tokens is None else list(state.draft_tokens),
        )
        return self._ask(spec, params, streaming=True)

    def _ask(self, spec: RunSpec, disaggregated: Any, *, streaming: bool) -> Result:
        if spec.adapter is not None and spec.adapter not in self._adapters:
            raise UnsupportedParameter("this adapter is not loaded", param="model")
        try:
            return self._llm.generate_async(
                list(spec.trunk),
                sampling_params(self._api, spec.sampling, len(spec.choices[0].generated), self._eos_ids),
                streaming=streaming,
                lora_request=None if spec.adapter is None else self._adapters[spec.adapter],
                disaggregated_params=disaggregated,
                cache_salt=spec.salt.hex() or None,
            )
        except (ValueError, TypeError, NotImplementedError) as error:
            _log.info("TensorRT-LLM refuses run %d: %s", spec.run, error)
            raise InvalidRequest("The engine cannot compute this request.") from error
        except Exception as error:
            self._on_fault(error)
            raise Unavailable("the engine has ended") from error
