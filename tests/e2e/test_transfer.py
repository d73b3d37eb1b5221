"""Real workers hand over by each carrier alone, with nothing to fall back on; the tokens are those of one process."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import StartScripted
from tests.e2e.test_scripted import chat
from tests.kv.rig import needs_nixl


@pytest.mark.slow
@pytest.mark.parametrize("carrier", ["shm", "tcp", pytest.param("nixl", marks=needs_nixl)])
async def test_every_carrier_gives_the_tokens_of_one_process(scripted_stack: StartScripted, carrier: str) -> None:
    prompts = [f"tell me about {number} " + "and more " * number for number in (1, 8, 3)]
    alone, pair = scripted_stack("--both", "1"), scripted_stack(HEADRACE_WORKER__TRANSFER=carrier)
    for prompt in prompts:
        expected = await chat(alone, prompt, max_tokens=20)
        assert (await chat(pair, prompt, max_tokens=20))["choices"] == expected["choices"]
