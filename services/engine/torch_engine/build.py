"""Model files and settings → a running engine's parts, put together."""

from __future__ import annotations

import logging
from pathlib import Path

from schemas.state import Capabilities
from services.clock import Clock
from services.engine.core import StepEngine
from services.engine.grammars import kinds, read_grammars
from services.engine.host import has_gpu_driver
from services.engine.model_files import read_eos_ids
from services.engine.protocol import EngineInfo
from services.engine.speculation import build_scheduler
from services.engine.torch_engine.backend import Backend
from services.engine.torch_engine.config import LlamaConfig, load_config
from services.engine.torch_engine.kernel.start import load_kernel
from services.engine.torch_engine.pool_size import BLOCK_TOKENS
from services.kv.hashing import kv_compat
from services.kv.prefix_cache import prefix_cache
from services.models.errors import ModelError
from services.models.store import ModelFiles
from services.settings.worker import WorkerSettings

_log = logging.getLogger(__name__)
NAME = "torch"
VERSION = "1"
"""Raised when a change makes other bits of the same weights and ids."""


def build(files: ModelFiles, settings: WorkerSettings, clock: Clock, *, kernels: Path | None = None) -> StepEngine:
    """The engine for one model: the C kernel's, built into the folder `kernels`, or pure torch without it.

    Takes seconds when there is something to compile or to read. Raises `ModelError` for a model that is not supported or
    damaged, `SettingsError` for too little KV memory.
    """
    config = load_config(files.config)
    eos_ids = _eos_ids(files, config)
    backend = _backend(files, config, settings, eos_ids, kernels)
    grammars = read_grammars(files, config.vocab, eos_ids)
    info = _info(files, config, settings, backend, eos_ids, kinds(grammars))
    if settings.speculative_tokens and not backend.exact:
        _log.warning("speculative decoding without exact rows: it may change tokens where two are nearly equally likely")
    return StepEngine(
        info=info,
        pool=backend.pool,
        runner=backend.runner,
        scheduler=build_scheduler(settings, info, backend.pool),
        clock=clock,
        grammars=grammars,
    )


def _eos_ids(files: ModelFiles, config: LlamaConfig) -> frozenset[int]:
    """Those that can be drawn: a tokenizer may know more tokens than the model has rows for."""
    named = read_eos_ids(files.folder)
    found = frozenset(token for token in named if 0 <= token < config.vocab)
    if not found:
        raise ModelError(f"end of sequence {sorted(named)} is outside a vocabulary of {config.vocab}: answers would never end")
    return found


def _backend(
    files: ModelFiles, config: LlamaConfig, settings: WorkerSettings, eos_ids: frozenset[int], kernels: Path | None
) -> Backend:
    prefix = prefix_cache(enabled=settings.prefix_cache)
    kernel = load_kernel(kernels) if kernels is not None and not _computes_in_torch(settings) else None
    if kernel is not None:
        return kernel.assemble(files, config, settings, prefix=prefix, eos_ids=eos_ids)
    from services.engine.torch_engine.pure import assemble  # loads torch, which the kernel does without

    return assemble(files, config, settings, prefix=prefix, eos_ids=eos_ids)


def _computes_in_torch(settings: WorkerSettings) -> bool:
    """The kernel computes on the CPU and in its own precision. Torch is loaded only where a GPU may be found."""
    if settings.device == "cuda" or settings.dtype != "auto":
        return True
    if settings.device == "cpu" or not has_gpu_driver():
        return False
    from services.engine.torch_engine.device import choose

    return choose(settings).device.type == "cuda"


def _info(
    files: ModelFiles,
    config: LlamaConfig,
    settings: WorkerSettings,
    backend: Backend,
    eos_ids: frozenset[int],
    grammar_kinds: tuple[str, ...],
) -> EngineInfo:
    return EngineInfo(
        name=NAME,
        version=VERSION,
        model=files.name,
        weights=files.weights,
        kv_compat=kv_compat(
            weights=files.weights,
            kv_dtype=backend.kv_dtype,
            block_tokens=BLOCK_TOKENS,
            layout=backend.layout,
            engine=NAME,
            engine_version=VERSION,
            numerics=backend.numerics,
            parallelism="1",
        ),
        capabilities=Capabilities(
            seed=True,
            penalties=True,
            n=True,
            logprobs=True,
            top_k=True,
            min_p=True,
            logit_bias=True,
            grammar=grammar_kinds,
            exact_resume=backend.exact,
            prompt_logprobs=True,
        ),
        context_length=min(config.context, backend.tokens),
        vocab_size=config.vocab,
        block_tokens=BLOCK_TOKENS,
        eos_ids=eos_ids,
        step_tokens=settings.step_tokens,
        max_batch=settings.max_batch,
    )
