"""The engine's parts when torch computes. Importing this loads torch."""

from __future__ import annotations

from services.engine.host import available_cores
from services.engine.torch_engine import memory
from services.engine.torch_engine.backend import Backend
from services.engine.torch_engine.config import LlamaConfig
from services.engine.torch_engine.device import Place, choose
from services.engine.torch_engine.model import Llama
from services.engine.torch_engine.runner import TorchRunner
from services.engine.torch_engine.weights import load_weights, weight_bytes
from services.kv.prefix import PrefixCache
from services.models.store import ModelFiles
from services.settings.worker import WorkerSettings


def assemble(
    files: ModelFiles,
    config: LlamaConfig,
    settings: WorkerSettings,
    *,
    prefix: PrefixCache | None,
    eos_ids: frozenset[int],
    place: Place | None = None,
) -> Backend:
    """Reads all weights. Raises `ModelError`, `SettingsError`."""
    place = place or choose(settings)
    kv = memory.allocate(config, settings, place.room(weight_bytes(config, place.dtype)), prefix, place)
    threads = settings.threads or max(1, len(available_cores()) // settings.machine_workers)
    model = Llama(config, load_weights(files.safetensors, config, place), kv.tensor)
    return Backend(
        runner=TorchRunner(model, threads=threads, eos_ids=eos_ids),
        pool=kv.pool,
        tokens=kv.tokens,
        kv_dtype=place.dtype_name,
        layout=memory.LAYOUT,
        numerics=place.numerics,
        exact=False,  # a matrix product's order of summation follows its number of rows
    )
