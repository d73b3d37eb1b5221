"""The default model itself: converted weights give the reference's tokens under `transformers`."""

from __future__ import annotations

import pytest

from services.models.catalog import DEFAULT_MODEL, SMOLLM2_135M
from services.models.manifest import MANIFEST, read_manifest, summarise
from services.models.store import ModelFiles
from tests.text.test_real_model import KUBERNETES_IDS

pytestmark = pytest.mark.model

GREEDY_IDS = [
    *[59, 23385, 37491, 314, 253, 3197, 3941, 338, 6396, 32639, 28, 6636, 7867, 1699, 260, 5594, 30],
    *[657, 506, 253, 7934, 30598, 309, 817, 338, 2518, 2701, 6120, 288, 1658, 335, 260],
]
"""32 tokens after `KUBERNETES_IDS`, greedy, float32 arithmetic."""


def test_what_lies_in_the_store(default_model: ModelFiles) -> None:
    assert default_model.name == DEFAULT_MODEL
    manifest = read_manifest(default_model.folder / MANIFEST)
    assert manifest is not None
    assert manifest.source == SMOLLM2_135M.gguf_sha256
    assert manifest.weights == summarise(default_model.config, default_model.safetensors).weights == default_model.weights
    size = sum(file.stat().st_size for file in default_model.folder.iterdir())
    assert abs(size - SMOLLM2_135M.converted_bytes) < 1_000_000


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_greedy_tokens_equal_the_reference(default_model: ModelFiles) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(default_model.folder, dtype=torch.float32)
    prompt = torch.tensor([KUBERNETES_IDS])
    output = model.generate(prompt, max_new_tokens=len(GREEDY_IDS), do_sample=False)
    assert output[0, len(KUBERNETES_IDS) :].tolist() == GREEDY_IDS
