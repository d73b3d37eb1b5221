"""The tiny checkpoints, made once."""

from __future__ import annotations

import pytest

from tests.engine.torch_engine import tiny


@pytest.fixture(scope="session")
def gqa(tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    """Three query heads a KV head, an output head of its own."""
    return tiny.make(tmp_path_factory.mktemp("gqa"))


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    """No GQA, tied embeddings, a head_dim that is not hidden / heads, another rope base."""
    changes = {"num_key_value_heads": 6, "head_dim": 16, "tie_word_embeddings": True, "rope_theta": 1e5}
    return tiny.make(tmp_path_factory.mktemp("tied"), **changes)


@pytest.fixture(scope="session", params=["gqa", "tied"])
def model(request: pytest.FixtureRequest) -> tiny.Tiny:
    found: tiny.Tiny = request.getfixturevalue(request.param)
    return found
