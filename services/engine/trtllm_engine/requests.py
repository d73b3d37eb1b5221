"""The requests that are in TensorRT-LLM: what they say becomes reports, and entries in the books.

Owns the legs. Must not know how a request is made. Invariants: a handoff that the engine made leaves in a report, also when its
run was dropped meanwhile; each leg that is not handed off ends in exactly one `RunEnd`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from schemas.lifecycle import State
from services.clock import Clock
from services.engine.protocol import EngineInfo, EngineWorn, RunEnd, RunSpec
from services.engine.trtllm_engine.books import Books
from services.engine.trtllm_engine.handoff import MAX_BYTES, encode, of_context
from services.engine.trtllm_engine.legs import Kind, Leg, finish_of
from services.engine.trtllm_engine.mirror import Mirror
from services.engine.trtllm_engine.reports import Reports
from services.kv.hashing import chain_root

_log = logging.getLogger(__name__)


class Requests:
    """`on_fault`: called with anything but the failure of one request. `timeout_s`: the engine's for transfers."""

    def __init__(
        self,
        info: EngineInfo,
        books: Books,
        mirror: Mirror,
        reports: Reports,
        clock: Clock,
        timeout_s: float,
        request_error: type[Exception],
        on_fault: Callable[[Exception], None],
    ) -> None:
        self._info = info
        self._books = books
        self._mirror = mirror
        self._reports = reports
        self._clock = clock
        self._timeout_s = timeout_s
        self._request_error = request_error
        self._on_fault = on_fault
        self._legs: dict[int, Leg] = {}
        self._heard = clock.monotonic()

    def __len__(self) -> int:
        return len(self._legs)

    def __contains__(self, run: int) -> bool:
        return run in self._legs

    def __iter__(self) -> Iterator[Leg]:
        return iter(list(self._legs.values()))

    def add(self, leg: Leg) -> None:
        self._legs[leg.spec.run] = leg
        self._mirror.expect(self._root(leg.spec), leg.spec.trunk)

    def drop(self, run: int, ending: State, choice: int | None = None) -> None:
        """The run, if it is here and `choice` is its own, or None, is wanted no more."""
        leg = self._legs.get(run)
        if leg is not None and choice in (None, leg.choice):
            leg.drop(RunEnd(run, ending), self._clock.monotonic())

    def heard(self) -> None:
        """The engine finished an iteration."""
        self._heard = self._clock.monotonic()

    @property
    def still_s(self) -> float:
        """How long the engine has not moved, although it has something to compute."""
        begun = [leg.began for leg in self._legs.values() if not leg.committing]
        return self._clock.monotonic() - max(self._heard, min(begun)) if begun else 0.0

    async def read(self, leg: Leg) -> None:
        """Until the engine says no more of it."""
        try:
            async for output in leg.result:
                self._on_output(leg, output.outputs[0], int(output.cached_tokens or 0))
        except self._request_error as error:
            _log.warning("run %d: the engine gave it up: %s", leg.spec.run, error)
            # Before its first chunk the client has seen nothing of this leg: another attempt may well succeed.
            self._leave(leg, State.FAILED if leg.started else State.RETRY, "engine_request_error")
        except Exception as error:
            self._on_fault(error)
        else:
            self._leave(leg, State.FAILED, "engine_error")  # unless it ended in its last chunk

    def give_up_late_ones(self) -> None:
        """Legs that the engine does not end: their edges are told. Raises `EngineWorn` for one that it never ends."""
        now, patience = self._clock.monotonic(), 2 * self._timeout_s
        for leg in self:
            if leg.given_up_at is not None:
                if now - leg.given_up_at > patience:
                    raise EngineWorn("the engine neither ends nor drops a request")
            elif (leg.committing and now - leg.began > patience) or (leg.ending and now - leg.dropped_at > patience):
                leg.give_up(now)
                ended = leg.ending or RunEnd(leg.spec.run, State.RETRY, "handoff_lost")
                self._reports.end(ended, dropped=leg.ending is not None)

    def clear(self) -> None:
        """Forget all, without a report."""
        for run in list(self._legs):
            del self._legs[run]
            self._books.end(run)

    # inside

    def _on_output(self, leg: Leg, completion: Any, cached_tokens: int) -> None:
        now = self._clock.monotonic()
        self._heard = now
        leg.totals.compute_s += (now - leg.seen) / max(1, len(self._legs))
        leg.seen = now
        leg.first_chunk()
        if leg.kind is not Kind.GENERATION:  # there what was transferred counts as cached
            leg.totals.cached_tokens = cached_tokens
        if leg.kind is Kind.CONTEXT and completion.finish_reason in ("length", "not_finished"):
            self._hand_off(leg, completion)
        elif leg.wanted:
            self._take(leg, completion, now)

    def _take(self, leg: Leg, completion: Any, now: float) -> None:
        finish = finish_of(completion)
        outputs = leg.outputs(leg.take(completion, min(self._info.eos_ids)), finish)
        if not leg.agrees():
            leg.drop(RunEnd(leg.spec.run, State.FAILED, "other_first_token"), now)
            return
        self._reports.tokens(outputs)
        if finish is not None:
            self._leave(leg, State.FINISHED)

    def _hand_off(self, leg: Leg, completion: Any) -> None:
        """The context request is done and its blocks wait to be fetched: also for a run that was dropped meanwhile."""
        state = of_context(completion.disaggregated_params, self._info.version, len(leg.spec.trunk))
        opaque = b"" if state is None else encode(state)
        if not 0 < len(opaque) <= MAX_BYTES:
            self._leave(leg, State.FAILED, "no_handoff")
            return
        leg.finished = True
        del self._legs[leg.spec.run]
        self._books.pin(leg.spec.run)
        self._reports.tokens(leg.outputs(leg.take(completion, min(self._info.eos_ids)), None))
        leg.totals.opaque = opaque
        self._reports.prefilled(leg.spec.run, leg.totals)

    def _leave(self, leg: Leg, state: State, reason: str = "") -> None:
        """The request is over in the engine. How a dropped run ends was settled when it was dropped."""
        if leg.finished:
            return
        leg.finished = True
        run = leg.spec.run
        del self._legs[run]
        self._mirror.expect(self._root(leg.spec), (*leg.spec.trunk, *leg.tokens))
        self._books.end(run)
        if leg.given_up_at is None:
            self._reports.end(leg.ending or RunEnd(run, state, reason), dropped=leg.ending is not None)

    def _root(self, spec: RunSpec) -> bytes:
        return chain_root(self._info.kv_compat, spec.salt, spec.adapter)
