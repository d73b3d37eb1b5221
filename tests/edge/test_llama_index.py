"""LlamaIndex against the edge, over real HTTP. It needs openai<3, and we test with a newer one: it gets its own environment."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.state import Capabilities
from services.text.grammar import KINDS
from tests.edge.fakes import MODEL, Api, says
from tests.edge.test_http import served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
PACKAGE = "llama-index-llms-openai-like>=0.8,<0.9"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def python() -> Path:
    """An interpreter that has it; made once, 290 MB. Where it cannot be had the test is skipped, but not in CI."""
    folder = ROOT / ".venv-llama-index"
    interpreter, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=120)
            subprocess.run([str(interpreter), "-m", "pip", "install", "-q", PACKAGE], check=True, timeout=400)
        except subprocess.SubprocessError as error:
            if os.environ.get("CI") in ("true", "1"):
                raise
            pytest.skip(f"no LlamaIndex: {error}")
        ready.touch()
    return interpreter


async def test_llama_index(python: Path) -> None:
    api = Api()
    api.jobs.capabilities = Capabilities(seed=True, n=True, logprobs=True, grammar=KINDS)
    api.jobs.context = 8192  # a token is a byte here
    api.jobs.scripts = [says(CALL)]
    api.jobs.default = says("hel", "lo")
    async with served(api) as server:
        client = Path(__file__).with_name("llama_index_client.py")
        process = await asyncio.create_subprocess_exec(
            *(str(python), str(client), f"http://127.0.0.1:{server.port}/v1", MODEL), stdout=asyncio.subprocess.PIPE, cwd=ROOT
        )
        out, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0
    assert json.loads(out) == {
        "chat": "hello",
        "streamed": "hello",
        "completion": "hello",
        "calls": [["weather", {"city": "Paris"}]],
    }
