"""`trtllm.speculative`: fields of one of TensorRT-LLM's classes, wrong ones refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.engine.trtllm_engine.contract import SPECULATIVE
from services.engine.trtllm_engine.speculation import speculation
from services.settings.errors import SettingsError
from tests.engine.trtllm_engine.double import World, api


@pytest.mark.parametrize(
    "table",
    [
        {"decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_size": 2},
        {"decoding_type": "MTP", "num_nextn_predict_layers": 3},
        {"decoding_type": "AUTO"},
        {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model": "."},
        {"decoding_type": "DraftTarget", "max_draft_len": 3, "speculative_model": "."},
    ],
)
def test_what_is_right_makes_an_object_of_its_class(table: dict[str, Any]) -> None:
    made = speculation(table)
    configuration = api(World()).speculative[made.kind](made.fields)
    assert type(configuration).__name__ == SPECULATIVE[table["decoding_type"]]
    for key, value in table.items():
        assert key == "decoding_type" or getattr(configuration, key) == value


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, "speculative.decoding_type: None is none of Eagle, MTP"),
        ({"decoding_type": "Lookahead"}, "speculative.decoding_type"),
        ({"decoding_type": "Medusa", "num_medusa_heads": 4}, "speculative.decoding_type"),
        ({"decoding_type": "Auto"}, "speculative.decoding_type"),
        ({"decoding_type": "NGram"}, "speculative.max_draft_len: NGram needs it"),
        ({"decoding_type": "NGram", "max_draft_len": 4, "ngram_size": 2}, "speculative.ngram_size: NGram has no such field"),
        ({"decoding_type": "MTP", "max_matching_ngram_size": 4}, "speculative.max_matching_ngram_size: MTP has no"),
        ({"decoding_type": "Eagle", "max_draft_len": 3}, "speculative.speculative_model: Eagle needs it"),
        (
            {"decoding_type": "DraftTarget", "max_draft_len": 3, "speculative_model": "someone/on-a-hub"},
            "speculative.speculative_model: there is no folder someone/on-a-hub",
        ),
        ({"decoding_type": "MTP", "allow_advanced_sampling": False}, "speculative.allow_advanced_sampling"),
    ],
)
def test_what_is_wrong_is_named(table: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=f"trtllm.{said}"):
        speculation(table)


def test_speculation_within_the_model_goes_on_to_heed_how_tokens_are_drawn(tmp_path: Path) -> None:
    eagle = {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model": str(tmp_path)}
    assert speculation({"decoding_type": "MTP"}).fields["allow_advanced_sampling"]
    assert speculation(eagle).fields["allow_advanced_sampling"]
    assert "allow_advanced_sampling" not in speculation(eagle | {"eagle3_one_model": False}).fields, "two models always do"
