"""A torch engine on its exact path, whose tokens come from logits: a decode worker that dies in the middle changes none of them.

Greedy and seeded streams, and whatever else shapes what is drawn: penalties count the tokens before a break as those after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.codec import decode
from schemas.job import Job, Sampling
from services.models.store import ModelFiles
from tests.chaos.processes import back, kill
from tests.chaos.streams import Question, ask, assert_same, clients, ready, until
from tests.chaos.tap import tap
from tests.chaos.test_resume import answers, request
from tests.chaos.workers import Workers
from tests.e2e.conftest import READY_S, UP
from tests.e2e.operator import operator
from tests.e2e.running import Up, started
from tests.e2e.test_response_format import PERSON
from tests.engine.torch_engine.tiny import make
from tests.text.tiny import CONFIG, END, write_tiny_model_folder
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = 300
DROPPED = 5
SEEN = 10
"""Tokens of the plain stream when its worker dies."""
BIAS = {str(token): 2.0 for token in range(100, 140)}
PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "all three": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
}


def asked() -> dict[str, dict[str, Any]]:
    """Each without a seed's randomness and with it."""
    shaped = {"plain": {}, "bias": {"logit_bias": BIAS}, "nucleus": {"top_p": 0.8, "top_k": 30, "min_p": 0.01}, **PENALTIES}
    shaped |= {f"{name}, biased": {**how, "logit_bias": BIAS} for name, how in PENALTIES.items()}
    greedy = {f"greedy {name}": request(1, **_LONG, **how) | {"temperature": 0} for name, how in shaped.items()}
    seeded = {f"seeded {name}": request(7, **_LONG, **how) for name, how in shaped.items()}
    both = {"repetition_penalty": 1.3, "frequency_penalty": 0.4}
    more = {
        "choices": request(3, n=3, **_LONG, **both),
        "logprobs": request(4, logprobs=True, top_logprobs=3, **_LONG, **both),
        "constrained": request(5, response_format=PERSON, **_LONG, **both),
    }
    return greedy | seeded | more


_LONG = {"max_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("stack")
    model = write_tiny_model_folder(folder / "tiny")
    shape = {name: CONFIG[name] for name in ("vocab_size", "max_position_embeddings")}
    make(model, num_hidden_layers=2, bos_token_id=END, eos_token_id=END, **shape)
    argv = [*UP, "--model", str(model), "--prefill", "2", "--decode", "2", "--router", "2"]
    with started(argv, folder / "home", folder, env={"HEADRACE_WORKER__KV_BLOCKS": "1200"}) as running:
        running.wait_ready(READY_S)
        yield running
        assert not running.violations, running.violations


async def test_what_shapes_the_tokens_outlives_a_worker(up: Up) -> None:
    await ready(up.url)
    expected = await answers(up.url, asked())
    for name in PENALTIES:
        for how in ("greedy", "seeded"):
            assert expected[f"{how} {name}"].text != expected[f"{how} plain"].text, f"{name} changed nothing: it proves nothing"
    async with tap(up) as bus:
        statuses = (await bus.operator.workers()).values()
        assert all(status["state"]["capabilities"]["exact_resume"] for status in statuses), "this is not the exact path"
        submits = await bus.all_of("hr.submit.*")
        counts = {"greedy plain": 0}

        async def fault() -> None:
            await until(lambda: counts["greedy plain"] >= SEEN, 60.0)
            await back(up, "d1", kill(up, "d1"))

        told = await answers(up.url, asked(), counts, fault)
        resumed = [job for msg in submits if (job := decode(msg.data, Job)).resume and _has_tokens(job)]
        await bus.operator.assert_clean()
    assert told == expected
    for what in (_repetition, _presence, _frequency):
        assert any(what(job.sampling) for job in resumed), f"no such job was resumed in the middle: {what.__name__}"
    assert any(job.sampling.logit_bias for job in resumed)
    assert any(job.sampling.temperature for job in resumed)
    assert any(not job.sampling.temperature for job in resumed)


@pytest.mark.model
async def test_prompts_that_were_dropped_are_not_computed(default_model: ModelFiles, tmp_path: Path) -> None:
    """Of the default model five long prompts, each of many seconds: all are given up while the first is computed."""
    argv = [*UP, "--model", str(default_model.folder), "--prefill", "1", "--decode", "1"]
    with started(argv, tmp_path / "home", tmp_path) as up:
        up.wait_ready(READY_S)
        short = Question(2, 12, content="Tell me a story.", model=up.model)
        async with operator(up) as op, clients(up.url) as client:
            expected = await ask(client, short)
            workers = Workers(op, up, ("p1", "d1"))
            dropped = [asyncio.create_task(ask(client, _long(up, number))) for number in range(DROPPED)]
            await workers.at_least(1, 30.0)
            for task in dropped:
                task.cancel()
            assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*dropped, return_exceptions=True))
            await workers.idle_after(PATIENCE_S)
            assert_same([await ask(client, short)], [expected])
            await op.assert_clean()


def _long(up: Up, number: int) -> Question:
    """A prompt of thousands of tokens that no other begins like."""
    return Question(2 * number, 16, content=" ".join(f"{number} {word}" for word in range(800)), model=up.model)


def _has_tokens(job: Job) -> bool:
    return any(choice.generated for choice in job.choices)


def _repetition(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1


def _presence(sampling: Sampling) -> bool:
    return sampling.presence_penalty != 0


def _frequency(sampling: Sampling) -> bool:
    return sampling.frequency_penalty != 0
