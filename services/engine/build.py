"""From a model's files and the settings to an engine.

Only here an engine's kind is chosen; what an engine needs is loaded only for it.
"""

from __future__ import annotations

import json

from schemas.state import Capabilities, Role
from services.clock import Clock
from services.engine.core import StepEngine
from services.engine.grammars import kinds, read_grammars
from services.engine.protocol import DecodeEngine, EngineInfo
from services.engine.scripted import SLOT_BYTES, VERSION, ScriptedRunner, Timing, load_scripts
from services.engine.speculation import build_scheduler
from services.kv import memory as kv_memory
from services.kv.hashing import kv_compat
from services.kv.pool import BlockPool
from services.kv.prefix_cache import prefix_cache
from services.kv.swap import SwapSpace
from services.models.store import ModelFiles
from services.settings.errors import SettingsError
from services.settings.settings import Settings

DEFAULT_SCRIPTED_BLOCKS = 4096


def build_engine(files: ModelFiles, settings: Settings, clock: Clock, role: Role = Role.BOTH) -> DecodeEngine:
    """The engine of `settings.worker.engine`. Raises `ModelError`, `SettingsError`: what is wrong in one line."""
    if settings.worker.engine == "trtllm":
        from services.engine.trtllm_engine import build as trtllm

        return trtllm.build(files, settings.trtllm, clock, role)
    if settings.worker.engine == "scripted":
        return build_scripted(files, settings, clock)
    from services.engine.torch_engine.build import build

    return build(files, settings.worker, clock, kernels=settings.home_dir / "kernels")


def build_scripted(files: ModelFiles, settings: Settings, clock: Clock) -> StepEngine:
    """A scripted engine over the model's vocabulary; it needs no weights."""
    worker, scripted = settings.worker, settings.scripted
    config = json.loads(files.config.read_bytes())
    eos = config.get("eos_token_id") or 0
    eos_ids = frozenset(eos if isinstance(eos, list) else [eos])
    blocks = worker.kv_blocks or DEFAULT_SCRIPTED_BLOCKS
    if scripted.block_bytes < scripted.block_tokens * SLOT_BYTES:
        raise SettingsError(f"scripted.block_bytes: a block of {scripted.block_tokens} tokens takes {SLOT_BYTES} bytes for each")
    try:
        memory = kv_memory.allocate(blocks * scripted.block_bytes)
        scripts = load_scripts(scripted.scripts) if scripted.scripts is not None else ()
    except OSError as error:
        raise SettingsError(f"worker.kv_blocks: {blocks} of {scripted.block_bytes} bytes: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"scripted.scripts: {error}") from None
    prefix = prefix_cache(enabled=worker.prefix_cache)
    pool = BlockPool(
        blocks,
        block_bytes=scripted.block_bytes,
        memory=memory.view,
        fd=memory.fd,
        prefix=prefix,
        swap=SwapSpace(blocks // 4 if worker.kv_swap_mb is None else worker.kv_swap_mb * 2**20 // scripted.block_bytes),
    )
    runner = ScriptedRunner(
        pool,
        block_tokens=scripted.block_tokens,
        vocab=_plain_ids(files, config["vocab_size"]),
        eos_id=min(eos_ids),
        scripts=scripts,
        timing=Timing(scripted.prefill_token_s, scripted.decode_step_s),
    )
    grammars = read_grammars(files, config["vocab_size"], eos_ids)
    info = EngineInfo(
        name="scripted",
        version=VERSION,
        model=files.name,
        weights=files.weights,
        kv_compat=kv_compat(
            weights=files.weights,
            kv_dtype="fingerprint",
            block_tokens=scripted.block_tokens,
            layout="token",
            engine="scripted",
            engine_version=VERSION,
            numerics=scripted.numerics,
            parallelism="1",
        ),
        capabilities=Capabilities(
            seed=True, n=scripted.n, logprobs=True, grammar=kinds(grammars), exact_resume=True, prompt_logprobs=True
        ),
        context_length=config["max_position_embeddings"],
        vocab_size=config["vocab_size"],
        block_tokens=scripted.block_tokens,
        eos_ids=eos_ids,
        step_tokens=worker.step_tokens,
        max_batch=worker.max_batch,
    )
    return StepEngine(info, pool, runner, build_scheduler(worker, info, pool), clock, grammars)


def _plain_ids(files: ModelFiles, vocab_size: int) -> tuple[int, ...]:
    """Ids that are text: a script never draws a control token by chance."""
    added = json.loads(files.tokenizer.read_bytes()).get("added_tokens", [])
    special = {token["id"] for token in added if token.get("special")}
    return tuple(token for token in range(vocab_size) if token not in special)
