"""The default model through the kernel: the reference tokens, and rows that are the same in any company."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from services.engine.torch_engine.config import load_config
from services.engine.torch_engine.kernel.checkpoint import map_checkpoint
from services.engine.torch_engine.kernel.library import Library
from services.models.store import ModelFiles
from tests.engine.kernel.rig import Machine, Piece, Tokens
from tests.engine.torch_engine.test_real_model import ANSWER, KUBERNETES

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(400)]


def machine(library: Library, model: ModelFiles) -> Machine:
    return Machine(library, load_config(model.config), map_checkpoint(model.safetensors))


def generate(shared: Machine, tokens: Tokens, count: int, *, beside: list[Tokens]) -> list[int]:
    """Greedy; the sequences beside it go on, too."""
    for _ in range(count):
        pieces = [Piece(other, 1) for other in (tokens, *beside)]
        logits = shared.step(*pieces, threads=2)
        assert logits is not None
        for other, row in zip((tokens, *beside), logits, strict=True):
            other.ids.append(int(row.argmax()))
    return tokens.ids[-count:]


def test_the_reference_prompt_gives_the_reference_tokens_alone_in_pieces_and_in_company(
    library: Library, default_model: ModelFiles
) -> None:
    with machine(library, default_model) as shared:
        for cut, company in ((36, 0), (7, 0), (16, 3), (1, 7)):
            sequences = [Tokens(list(KUBERNETES), [shared.free.pop() for _ in range(5)]) for _ in range(company + 1)]
            for sequence in sequences:
                for start in range(0, 35, cut):
                    shared.step(Piece(sequence, min(cut, 35 - start)), threads=2)
            assert generate(shared, sequences[0], 32, beside=sequences[1:]) == list(ANSWER)
            shared.free += [block for sequence in sequences for block in sequence.blocks]


def test_logits_are_bitwise_the_same_in_mixed_steps(library: Library, default_model: ModelFiles) -> None:
    random = Random(1)
    with machine(library, default_model) as shared:
        prompts = [[random.randrange(100, 40_000) for _ in range(random.randint(20, 120))] for _ in range(6)]
        alone = [shared.whole(prompt) for prompt in prompts]
        sequences = [shared.tokens(prompt) for prompt in prompts]
        while left := [number for number, s in enumerate(sequences) if s.computed < len(s.ids)]:
            pieces = [
                Piece(sequences[number], random.randint(1, len(sequences[number].ids) - sequences[number].computed))
                for number in left
            ]
            logits = shared.step(*pieces, threads=random.randint(1, 3))
            assert logits is not None
            for number, row in zip(left, logits, strict=True):
                assert np.array_equal(row, alone[number][sequences[number].computed - 1])
