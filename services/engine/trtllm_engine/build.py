"""Model files and settings → a TensorRT-LLM engine, whose weights are loaded when this returns; that takes minutes."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from schemas.state import Role
from services.clock import Clock
from services.engine.model_files import read_eos_ids, read_json
from services.engine.protocol import EngineInfo
from services.engine.trtllm_engine.adapters import Adapter, lora_config
from services.engine.trtllm_engine.api import Api, load
from services.engine.trtllm_engine.capabilities import capabilities
from services.engine.trtllm_engine.engine import TrtllmEngine
from services.engine.trtllm_engine.extra import shape
from services.engine.trtllm_engine.leader import must_lead
from services.engine.trtllm_engine.options import Options, options
from services.kv.hashing import kv_compat
from services.models.errors import ModelError
from services.models.store import ModelFiles
from services.settings.errors import SettingsError
from services.settings.trtllm import TrtllmSettings

NAME = "tensorrt-llm"
_log = logging.getLogger(__name__)


def build(
    files: ModelFiles, settings: TrtllmSettings, clock: Clock, role: Role, load_api: Callable[[], Api] = load
) -> TrtllmEngine:
    """The package is verified before it is imported. Raises `SettingsError`, `ModelError`."""
    must_lead(os.environ)
    _look_at_transports(os.environ)
    config = _config(files.config)
    context_length = settings.max_context or int(config["max_position_embeddings"])
    quantization = _quantization(files.folder, settings.quantization)
    chosen = options(settings, role, context_length)
    _must_divide(config, settings.tensor_parallel)
    api = load_api()
    info = EngineInfo(
        name=NAME,
        version=api.version,
        model=files.name,
        weights=files.weights,
        kv_compat=_kv_compat(files, settings, chosen, api.version, quantization),
        capabilities=capabilities(settings),
        context_length=context_length,
        vocab_size=int(config["vocab_size"]),
        block_tokens=settings.block_tokens,
        eos_ids=read_eos_ids(files.folder),
        step_tokens=settings.step_tokens,
        max_batch=settings.max_batch,
    )
    try:
        llm = api.llm(
            str(files.folder),
            kv_cache_config=api.kv_cache_config(**chosen.kv_cache),
            cache_transceiver_config=api.transceiver_config(**chosen.transceiver),
            **_objects(api, settings, chosen),
            **chosen.llm,
        )
    except (ValueError, TypeError) as error:
        raise SettingsError(f"trtllm: TensorRT-LLM refuses these settings: {error}") from error
    except RuntimeError as error:
        raise SettingsError(f"trtllm: the engine cannot start here: {error}") from error
    return TrtllmEngine(
        api,
        llm,
        info,
        clock,
        timeout_s=settings.transfer_timeout_s,
        shutdown_s=settings.shutdown_timeout_s,
        adapters=_lora_requests(api, chosen.adapters),
    )


def _look_at_transports(environment: Mapping[str, str]) -> None:
    """A cluster may set them for its own network, without one for the memory of GPUs (NVIDIA/TensorRT-LLM PR 18373)."""
    listed = environment.get("UCX_TLS", "")
    if listed and not any(name.startswith(("cuda", "all", "^")) for name in listed.split(",")):
        _log.warning("UCX_TLS=%s has no transport for GPU memory: handoffs may fail", listed)


def _objects(api: Api, settings: TrtllmSettings, chosen: Options) -> dict[str, Any]:
    """Arguments of which there is one only where something was asked for."""
    made: dict[str, Any] = {}
    if chosen.speculation is not None:
        made["speculative_config"] = api.speculative[chosen.speculation.kind](chosen.speculation.fields)
    if chosen.adapters:
        lora = api.lora_config(**lora_config(chosen.adapters, settings.max_adapter_rank))
        made |= {"enable_lora": True, "lora_config": lora}
    return made


def _kv_compat(files: ModelFiles, settings: TrtllmSettings, chosen: Options, version: str, quantization: str) -> str:
    """Different parallelism on both sides has given wrong output (NVIDIA/TensorRT-LLM#6507), so only equal engines are paired."""
    adapters = {adapter.name: adapter.digest for adapter in chosen.adapters}
    tables = (json.dumps(each, sort_keys=True) for each in (settings.speculative, adapters, shape(settings.extra)))
    return kv_compat(
        weights=files.weights,
        kv_dtype=settings.kv_dtype,
        block_tokens=settings.block_tokens,
        layout=f"transceiver {settings.transceiver}",
        engine=NAME,
        engine_version=version,
        numerics=" ".join((settings.dtype, quantization, *tables)),
        parallelism=f"tp{settings.tensor_parallel} pp{settings.pipeline_parallel}",
    )


def _config(path: Path) -> dict[str, Any]:
    config = read_json(path)
    for key in ("vocab_size", "max_position_embeddings"):
        if not isinstance(config.get(key), int):
            raise ModelError(f"{path} has no {key}")
    return config


def _quantization(folder: Path, wanted: str) -> str:
    """What the checkpoint says: 1.2.1's PyTorch backend takes it from there and nowhere else."""
    of_modelopt = read_json(folder / "hf_quant_config.json").get("quantization", {}).get("quant_algo")
    of_config = read_json(folder / "config.json").get("quantization_config", {}).get("quant_method")
    found = str(of_modelopt or of_config or "")
    if wanted and wanted.lower() != found.lower():
        raise SettingsError(f"trtllm.quantization: the checkpoint in {folder} says {found or 'none'}, not {wanted}")
    return found


def _must_divide(config: dict[str, Any], parts: int) -> None:
    """Each of `parts` GPUs computes whole attention heads."""
    heads = config.get("num_attention_heads")
    if isinstance(heads, int) and heads % parts:
        raise SettingsError(f"trtllm.tensor_parallel: the model's {heads} attention heads cannot be shared by {parts} GPUs")


def _lora_requests(api: Api, adapters: Sequence[Adapter]) -> dict[str, Any]:
    """Numbered from 1, in order of their names, so that all workers of a pool number them alike."""
    return {each.name: api.lora_request(each.name, number, str(each.folder)) for number, each in enumerate(adapters, start=1)}
