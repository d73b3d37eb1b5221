"""Configurations of the double that the tests of the adapter's settings need: speculation and LoRA, as 1.2.1 has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self


@dataclass(kw_only=True)
class DecodingBaseConfig:
    """Strict: a field that it has not is refused."""

    max_draft_len: int | None = None
    max_total_draft_tokens: int | None = None
    speculative_model: Any = None
    max_concurrency: int | None = None
    draft_len_schedule: Any = None
    load_format: str | None = None
    acceptance_window: int | None = None
    acceptance_length_threshold: float | None = None
    allow_advanced_sampling: bool = False

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        try:
            return cls(**data)
        except TypeError as error:
            raise ValueError(str(error)) from None


@dataclass(kw_only=True)
class EagleDecodingConfig(DecodingBaseConfig):
    eagle_choices: Any = None
    greedy_sampling: bool = True
    posterior_threshold: float | None = None
    use_dynamic_tree: bool = False
    dynamic_tree_max_topK: int | None = None
    num_eagle_layers: int | None = None
    max_non_leaves_per_layer: int | None = None
    eagle3_one_model: bool = True
    eagle3_layers_to_capture: Any = None
    eagle3_model_arch: str = "llama3"


@dataclass(kw_only=True)
class MTPDecodingConfig(DecodingBaseConfig):
    num_nextn_predict_layers: int = 1
    use_relaxed_acceptance_for_thinking: bool = False
    relaxed_topk: int = 1
    relaxed_delta: float = 0.0
    use_mtp_vanilla: bool = False
    mtp_eagle_one_model: bool = True
    num_nextn_predict_layers_from_model_config: int = 1
    begin_thinking_phase_token: int = 128798
    end_thinking_phase_token: int = 128799


@dataclass(kw_only=True)
class NGramDecodingConfig(DecodingBaseConfig):
    max_matching_ngram_size: int = 0
    is_keep_all: bool = True
    is_use_oldest: bool = True
    is_public_pool: bool = True


@dataclass(kw_only=True)
class DraftTargetDecodingConfig(DecodingBaseConfig):
    pass


@dataclass(kw_only=True)
class AutoDecodingConfig(DecodingBaseConfig):
    pass


@dataclass
class LoraConfig:
    lora_dir: list[str] = field(default_factory=list)
    lora_ckpt_source: str = "hf"
    max_lora_rank: int = 64
    lora_target_modules: list[str] = field(default_factory=list)
    trtllm_modules_to_hf_modules: dict[str, str] = field(default_factory=dict)
    max_loras: int | None = None
    max_cpu_loras: int | None = None


@dataclass(slots=True)
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_ckpt_source: str = "hf"

    def __post_init__(self) -> None:
        if not Path(self.lora_path).exists():
            raise ValueError(f"lora_path ({self.lora_path}) does not exist.")
