"""The opaque part of our Handoff: what a context request of TensorRT-LLM left for the generation request that consumes it.

MessagePack, never pickle. `opaque_state` is a capability: TensorRT-LLM's C++ reads it, and it holds peers' addresses, so it
travels on our authenticated subjects only and is checked before the engine sees it. A generation request without first tokens can
end a rank upstream, which is why nothing unchecked is passed on.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

from schemas.errors import UnreadableMessage
from schemas.handoff import FirstToken
from schemas.job import U64
from services.engine.protocol import EngineInfo, RunSpec

MAX_BYTES = 2**19
"""Of one opaque part: a NATS message holds a megabyte, with a prompt in it."""
MAX_DRAFT = 64


class OpaqueState(msgspec.Struct, frozen=True, kw_only=True):
    """`prompt_tokens`: how many ids the context request computed, which the generation request must name again."""

    version: str
    prompt_tokens: int
    ctx_request_id: int
    first_gen_tokens: tuple[int, ...]
    opaque_state: bytes
    draft_tokens: tuple[int, ...] | None = None


class Consumed:
    """The newest handoffs that were consumed here: none is ever consumed twice, whoever brings it again."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, data: bytes) -> bool:
        return _digest(data) in self._seen

    def add(self, data: bytes) -> None:
        self._seen[_digest(data)] = None
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(OpaqueState)


def of_context(params: Any, version: str, prompt_tokens: int) -> OpaqueState | None:
    """What a context response's `DisaggregatedParams` hold; None when they are no handoff. Only known fields are read."""
    if params is None or params.ctx_request_id is None or not params.opaque_state or not params.first_gen_tokens:
        return None
    return OpaqueState(
        version=version,
        prompt_tokens=prompt_tokens,
        ctx_request_id=int(params.ctx_request_id),
        first_gen_tokens=tuple(params.first_gen_tokens),
        opaque_state=bytes(params.opaque_state),
        draft_tokens=None if params.draft_tokens is None else tuple(params.draft_tokens),
    )


def encode(state: OpaqueState) -> bytes:
    return _encoder.encode(state)


def checked(data: bytes, info: EngineInfo, spec: RunSpec, first: Sequence[FirstToken]) -> OpaqueState:
    """`data` as a handoff of this run's prompt to this engine. Raises `UnreadableMessage` that says what is wrong with it."""
    if len(data) > MAX_BYTES:
        raise UnreadableMessage(f"an opaque handoff of {len(data)} bytes; at most {MAX_BYTES} are read")
    try:
        state = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UnreadableMessage(f"not an opaque handoff: {error}") from None
    if problem := _problem(state, info, spec, first):
        raise UnreadableMessage(f"a handoff that cannot be used: {problem}")
    return state


def _problem(state: OpaqueState, info: EngineInfo, spec: RunSpec, first: Sequence[FirstToken]) -> str:
    if state.version != info.version:
        return "made by another version"
    if state.prompt_tokens != len(spec.trunk):
        return "of another prompt"
    if not 0 <= state.ctx_request_id < U64:
        return "its request id is out of range"
    if not state.opaque_state:
        return "its state is empty"
    if len(state.first_gen_tokens) != 1 or [token.token for token in first] != list(state.first_gen_tokens):
        return "its first token is another one"
    drafts = state.draft_tokens or ()
    if len(drafts) > MAX_DRAFT or not all(0 <= token < info.vocab_size for token in drafts):
        return "its draft tokens are out of range"
    return ""
