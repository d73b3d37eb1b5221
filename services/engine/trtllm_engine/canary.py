"""One small request of both phases: whether a TensorRT-LLM engine answers, and what makes it look after itself.

It is one token of a prompt of one and needs no peer. In 1.2's line there are no statistics before the first request, and the
clean-up of handoffs that nobody fetched runs only when a prompt is scheduled (NVIDIA/TensorRT-LLM PR 12313).
"""

from __future__ import annotations

import asyncio
import logging

from schemas.errors import HeadraceError, InternalError, Unavailable
from services.engine.protocol import EngineInfo
from services.engine.trtllm_engine.api import Api, Llm
from services.engine.trtllm_engine.sampling import canary_params
from services.engine.trtllm_engine.statistics import Iteration, read_iteration

WARM_UP_S = 600.0
"""The first request may compile and tune kernels."""
AGAIN_S = 0.05
_SALT = "headrace canary"
_log = logging.getLogger(__name__)


class Canary:
    """`blocks`: of KV, as the statistics of its own iteration count them: several where the engine keeps several windows, none
    where they are taken after its end."""

    def __init__(self, api: Api, llm: Llm, info: EngineInfo) -> None:
        self._api = api
        self._llm = llm
        self._eos = info.eos_ids
        self.blocks = 0

    async def run(self, within: float) -> bool:
        """Whether it came back within `within` seconds. Raises what broke the engine."""
        params = canary_params(self._api, self._eos)
        result = self._llm.generate_async([min(self._eos)], params, streaming=False, cache_salt=_SALT)
        try:
            async with asyncio.timeout(within):
                async for _ in result:
                    continue
        except TimeoutError:
            result.abort()
            return False
        except self._api.request_error as error:
            _log.warning("the canary request failed: %s", error)
            return False
        return True


async def warm_up(canary: Canary, llm: Llm) -> Iteration:
    """The engine's first request, and the statistics it then has. Raises `Unavailable`, `InternalError`."""
    try:
        if not await canary.run(WARM_UP_S):
            raise Unavailable(f"the engine did not answer its first request in {WARM_UP_S:.0f} s")
    except HeadraceError:
        raise
    except Exception as error:
        raise InternalError(f"the engine failed its first request: {error}") from error
    iteration = await _first_iteration(llm, WARM_UP_S)
    canary.blocks = iteration.used
    return iteration


async def _first_iteration(llm: Llm, within: float) -> Iteration:
    """The newest statistics there are: none exist before the first request. Raises `Unavailable`."""
    try:
        async with asyncio.timeout(within):
            while True:
                async for item in llm.get_stats_async(timeout=AGAIN_S):
                    iteration = read_iteration(item)
                    if iteration.total:
                        return iteration
                await asyncio.sleep(AGAIN_S)
    except (TimeoutError, ValueError) as error:
        raise Unavailable(f"the engine says nothing of its KV pool after its first request: {error}") from None
