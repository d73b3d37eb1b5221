"""Tiny random checkpoints of the Llama family, and what transformers says of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PretrainedConfig, PreTrainedModel

from services.clock import SystemClock
from services.engine.core import StepEngine
from services.engine.torch_engine.build import build
from services.models.store import ModelFiles
from services.settings.worker import WorkerSettings

VOCAB = 257
EOS = 2
CONTEXT = 256


@dataclass(frozen=True, slots=True)
class Tiny:
    """A checkpoint on disk and the same model in transformers."""

    files: ModelFiles
    reference: PreTrainedModel

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Tensor:
        """[tokens, vocab]."""
        return self.reference(torch.tensor([ids])).logits[0]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """What transformers generates, end of sequence included."""
        settings = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=EOS, pad_token_id=0)
        made = self.reference.generate(torch.tensor([prompt]), generation_config=settings)
        return made[0, len(prompt) :].tolist()


def make(
    folder: Path,
    *,
    kind: type[PretrainedConfig] = LlamaConfig,
    shard: str = "5GB",
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Tiny:
    """A random model, saved as transformers saves it. Large weights, so that logits differ by much more than rounding.

    The reference is read back: a model that was cast keeps rotation frequencies of that precision.
    """
    torch.manual_seed(11)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.25,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "tie_word_embeddings": False,
    }
    model = AutoModelForCausalLM.from_config(kind(**shape | changes))
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # made as zeros and ones, which would hide a missing one
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Tiny(files_of(folder), reference)


def files_of(folder: Path) -> ModelFiles:
    return ModelFiles(
        name="tiny",
        folder=folder,
        config=folder / "config.json",
        tokenizer=folder / "tokenizer.json",
        chat_template=None,
        safetensors=tuple(sorted(folder.glob("*.safetensors"))),
        weights="w1",
    )


def engine(files: ModelFiles, *, kernels: Path | None = None, **settings: Any) -> StepEngine:
    """In pure torch, without a folder of `kernels`."""
    return build(files, WorkerSettings(**{"kv_blocks": 64, "threads": 1} | settings), SystemClock(), kernels=kernels)


def prompt(seed: int, length: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(3, VOCAB) for _ in range(length)]
