"""Finds, builds and tries the kernel; then the parts of an engine that computes with it.

Invariant: a machine without a working kernel is told so in one line, and never left without an engine.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from services.engine.cores import CoreArbiter, lock_folder
from services.engine.drafts import ROWS
from services.engine.host import available_cores, available_memory
from services.engine.torch_engine.backend import Backend
from services.engine.torch_engine.config import LlamaConfig
from services.engine.torch_engine.kernel import memory
from services.engine.torch_engine.kernel.checkpoint import map_checkpoint
from services.engine.torch_engine.kernel.compiler import KernelUnavailable, build, find_compiler
from services.engine.torch_engine.kernel.library import VERSION, Library
from services.engine.torch_engine.kernel.model import KernelModel
from services.engine.torch_engine.kernel.runner import KernelRunner
from services.engine.torch_engine.kernel.selftest import is_exact
from services.engine.torch_engine.pool_size import Room
from services.kv.prefix import PrefixCache
from services.models.store import ModelFiles
from services.settings.errors import SettingsError
from services.settings.worker import WorkerSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kernel:
    """`exact`: what the self-test found."""

    library: Library
    exact: bool

    def assemble(
        self,
        files: ModelFiles,
        config: LlamaConfig,
        settings: WorkerSettings,
        *,
        prefix: PrefixCache | None,
        eos_ids: frozenset[int],
    ) -> Backend:
        """Maps the weights and makes the KV memory. Raises `ModelError`, `SettingsError`."""
        weights = sum(file.stat().st_size for file in files.safetensors)
        kv = memory.allocate(self.library, config, settings, Room(available_memory(), shared=weights), prefix)
        cores = _arbiter(settings.threads)
        model = KernelModel(
            self.library,
            config,
            map_checkpoint(files.safetensors),
            kv.content,
            kv_dtype=memory.DTYPE,
            max_rows=settings.step_tokens + max(settings.max_batch, ROWS),
            max_threads=cores.most,
        )
        return Backend(
            runner=KernelRunner(model, cores=cores, eos_ids=eos_ids),
            pool=kv.pool,
            tokens=kv.tokens,
            kv_dtype="float16",
            layout=memory.LAYOUT,
            # Not the instruction set, which changes no bit; only whether a multiply-add rounds once.
            numerics=f"float32 kernel {VERSION} {'fused' if self.library.fused else 'unfused'}",
            exact=self.exact,
        )


def _arbiter(most: int) -> CoreArbiter:
    try:
        return CoreArbiter(lock_folder(), available_cores(), most)
    except OSError as error:
        raise SettingsError(f"the engines of this host cannot share its cores: {error}") from None


def load_kernel(folder: Path) -> Kernel | None:
    """The kernel built into `folder`, some seconds when it is not there yet; None when it cannot be had, which is logged."""
    try:
        library = Library(build(folder, find_compiler()))
    except KernelUnavailable as error:
        _log.warning("no CPU kernel, so pure torch computes, slower and not exactly the same in every batch: %s", error)
        return None
    exact = is_exact(library)
    if not exact:
        _log.warning("the CPU kernel (%s) failed its self-test: its results depend on the batch here", library.isa)
    return Kernel(library, exact)
