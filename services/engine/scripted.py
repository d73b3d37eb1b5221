"""The scripted engine's runner: plays fixed token ids with set delays and faults over real KV blocks, deterministically.

Its KV of a token is a 64-bit fingerprint of everything up to it, chained from the token before, so a block that is missing,
stale or another run's yields other tokens and is noticed: the first time a sequence is continued its last fingerprint is
compared with its ids. Without a script that fits, token i is drawn from (fingerprint, seed, choice, i), seed
and choice counting for nothing at temperature 0. Log-probabilities are made up, the same for the same draw. Under a
grammar only what that allows is drawn, whatever a script says.
"""

from __future__ import annotations

import asyncio
import os
import signal
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from schemas.errors import InvalidRequest
from schemas.reply import Logprob
from services.engine.constraint import Constraint, ConstraintBroken
from services.engine.drawing import accept, constraint_of, scored_ids
from services.engine.runner import Drawn, Failed, Outcome, Sampled, Scored
from services.engine.scheduler import Chunk, Step
from services.engine.sequence import Sequence as EngineSequence
from services.kv.pool import BlockPool

VERSION = "1"
SLOT = struct.Struct("<Q")
SLOT_BYTES = SLOT.size
"""Of a token in a KV block."""
_LINK = struct.Struct("<QI")
_DRAW = struct.Struct("<QQII")
_SLICE_S = 0.01  # how often a waiting step looks for cancelled rows, as a real one does between two layers


class Script(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """What to answer to a prompt that holds `prompt_contains` (token ids in a row).

    After `tokens` comes end of sequence. `fail_at`: the step that would draw this index raises. `kill_at`: the process ends
    there, as by kill -9. `step_s`: each of its steps takes this long, in seconds. `stall_at`: once in the life of a process, the
    step that would draw this index stands still for `stall_s` seconds, cancelled or not.
    """

    prompt_contains: tuple[int, ...]
    tokens: tuple[int, ...]
    fail_at: int | None = None
    kill_at: int | None = None
    step_s: float = 0.0
    stall_at: int | None = None
    stall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds a prompt token and a decode step take."""

    prefill_token_s: float = 0.0
    decode_step_s: float = 0.0


class ScriptedFault(Exception):
    """A fault that a script asked for, or KV that is not the sequence's."""


def load_scripts(path: Path) -> tuple[Script, ...]:
    """Scripts from a JSON array. Raises ValueError that names the file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=tuple[Script, ...])
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path}: {error}") from None


class ScriptedRunner:
    """Plays `scripts`; draws from `vocab` (ids that are plain text) otherwise. Blocks hold `block_tokens` fingerprints."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_tokens: int,
        vocab: Sequence[int],
        eos_id: int,
        scripts: Iterable[Script] = (),
        timing: Timing = Timing(),
    ) -> None:
        self._memory, self._block_bytes = pool.memory, pool.block_bytes
        self._block_tokens = block_tokens
        self._vocab = vocab
        self._size = max(*vocab, eos_id) + 1
        self._eos_id = eos_id
        self._scripts = tuple(scripts)
        self._timing = timing
        self._chosen: dict[tuple[int, int], Script | None] = {}
        self._checked: set[tuple[int, int]] = set()
        self._stalled: set[Script] = set()

    async def execute(self, step: Step) -> list[Outcome] | None:
        sequences = [chunk.sequence for chunk in step.chunks]
        if seconds := self._stall(step):
            await asyncio.sleep(seconds)
        if not await self._wait(self._duration(step), sequences):
            return None
        if self._scripts and any(chunk.samples and self._kills(chunk) for chunk in step.chunks):
            await asyncio.sleep(_SLICE_S)  # a real engine dies beside the event loop, not ahead of what it still has to send
            os.kill(os.getpid(), signal.SIGKILL)
        self._forget_ended(sequences)
        return [self._compute(chunk) for chunk in step.chunks]

    async def close(self) -> None:
        self._chosen.clear()
        self._checked.clear()

    def _duration(self, step: Step) -> float:
        decode = self._timing.decode_step_s if any(chunk.sequence.decoding for chunk in step.chunks) else 0.0
        scripts = [self._script(chunk.sequence) for chunk in step.chunks] if self._scripts else []
        scripted = max((script.step_s for script in scripts if script is not None), default=0.0)
        return max(step.prompt_tokens * self._timing.prefill_token_s, decode, scripted)

    def _stall(self, step: Step) -> float:
        """Seconds to stand still before this step."""
        if not self._scripts:
            return 0.0
        drawn = [(self._script(chunk.sequence), chunk.sequence.generated) for chunk in step.chunks if chunk.samples]
        stalling = {script for script, index in drawn if script and script.stall_at == index} - self._stalled
        self._stalled |= stalling
        return max((script.stall_s for script in stalling), default=0.0)

    async def _wait(self, seconds: float, sequences: list[EngineSequence]) -> bool:
        """False when every sequence was cancelled meanwhile. As long as that, however late each look comes."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (left := until - loop.time()) > 0:
            if all(sequence.cancelled for sequence in sequences):
                return False
            await asyncio.sleep(min(left, _SLICE_S))
        return True

    def _compute(self, chunk: Chunk) -> Outcome:
        sequence = chunk.sequence
        fingerprints = list(accumulate(chunk.ids, link, initial=self._before(sequence, chunk.start)))[1:]
        for position, fingerprint in enumerate(fingerprints, chunk.start):
            SLOT.pack_into(self._memory, self._slot(sequence, position), fingerprint)
        drawn = self._drawn(chunk, fingerprints)
        if chunk.scored == 0 or isinstance(drawn, Failed):
            return drawn
        return Scored(
            tuple(_made_up(token, sequence.sampling.prompt_logprobs or 0, rank=1) for token in scored_ids(chunk)), drawn
        )

    def _drawn(self, chunk: Chunk, fingerprints: list[int]) -> Drawn | Failed:
        """`fingerprints`: after each of the chunk's tokens."""
        sequence, fingerprint = chunk.sequence, fingerprints[-1]
        if not chunk.samples:
            return None
        if chunk.draft:
            rows = fingerprints[-len(chunk.draft) - 1 :]
            return accept(chunk.draft, lambda row: self._after_draft(sequence, rows[row], row))
        try:
            return tuple([self._sampled(sequence, fingerprint, choice, sequence.generated) for choice in sequence.drawing])
        except ConstraintBroken as broken:
            return Failed(str(broken), InvalidRequest.code)

    def _after_draft(self, sequence: EngineSequence, fingerprint: int, row: int) -> Sampled | Failed:
        """A fault that is due after the first token comes with the next step."""
        try:
            return self._sampled(sequence, fingerprint, sequence.choice, sequence.generated + row)
        except ConstraintBroken as broken:
            return Failed(str(broken), InvalidRequest.code)
        except ScriptedFault as fault:
            if row == 0:
                raise
            return Failed(str(fault))

    def _sampled(self, sequence: EngineSequence, fingerprint: int, choice: int, index: int) -> Sampled:
        constraint = constraint_of(sequence)
        token = self._draw(sequence, fingerprint, choice, index, constraint)
        complete = constraint is not None and constraint.take(token)
        count = sequence.sampling.logprobs
        if count is None:
            return Sampled(token, complete=complete)
        return Sampled(token, _made_up(token, count), complete)

    def _before(self, sequence: EngineSequence, start: int) -> int:
        """The fingerprint of the tokens before `start`, from the blocks; checked once a sequence. Raises ScriptedFault."""
        if start == 0:
            return 0
        (fingerprint,) = SLOT.unpack_from(self._memory, self._slot(sequence, start - 1))
        if (key := _key(sequence)) not in self._checked:
            self._checked.add(key)
            if reduce(link, sequence.ids[:start], 0) != fingerprint:
                raise ScriptedFault(f"the KV blocks of run {sequence.run} are not those of its tokens")
        return int(fingerprint)

    def _slot(self, sequence: EngineSequence, position: int) -> int:
        """Where in the pool's memory the fingerprint of the token there lies."""
        block, offset = divmod(position, self._block_tokens)
        return sequence.blocks[block] * self._block_bytes + offset * SLOT_BYTES

    def _kills(self, chunk: Chunk) -> bool:
        script, first = self._script(chunk.sequence), chunk.sequence.generated
        return script is not None and script.kill_at in range(first, first + len(chunk.draft) + 1)

    def _draw(self, sequence: EngineSequence, fingerprint: int, choice: int, index: int, constraint: Constraint | None) -> int:
        script = self._script(sequence) if self._scripts else None
        allowed = self._vocab if constraint is None else np.flatnonzero(constraint.allowed(self._size)).tolist()
        if script is not None:
            token = self._scripted(script, index)
            if constraint is None or token in allowed:
                return token
        by_chance = (sequence.sampling.seed, choice) if sequence.sampling.temperature > 0 else (0, 0)
        drawn = xxhash.xxh3_64_intdigest(_DRAW.pack(fingerprint, *by_chance, index))
        return allowed[drawn % len(allowed)]

    def _scripted(self, script: Script, index: int) -> int:
        if script.fail_at == index:
            raise ScriptedFault(f"the script fails at token {index}")
        return script.tokens[index] if index < len(script.tokens) else self._eos_id

    def _script(self, sequence: EngineSequence) -> Script | None:
        if (key := _key(sequence)) not in self._chosen:
            fitting = (script for script in self._scripts if _contains(sequence.spec.prompt, script.prompt_contains))
            self._chosen[key] = next(fitting, None)
        return self._chosen[key]

    def _forget_ended(self, sequences: list[EngineSequence]) -> None:
        if len(self._chosen) + len(self._checked) > 8192:
            live = {_key(sequence) for sequence in sequences}
            self._chosen = {key: script for key, script in self._chosen.items() if key in live}
            self._checked &= live


def _made_up(token: int, alternatives: int, rank: int = 0) -> Logprob:
    top = tuple((max(0, token - place), -0.5 - place) for place in range(alternatives))
    return Logprob(token=token, logprob=-0.5, top=top, rank=rank)


def _key(sequence: EngineSequence) -> tuple[int, int]:
    return sequence.run, sequence.choice


def link(before: int, token: int) -> int:
    return xxhash.xxh3_64_intdigest(_LINK.pack(before, token))


def _contains(ids: tuple[int, ...], needle: tuple[int, ...]) -> bool:
    width = len(needle)
    return any(ids[at : at + width] == needle for at in range(len(ids) - width + 1))
