"""Where pure torch computes, and in which precision: the CPU in float32, a GPU in bfloat16, or as the settings say.

Owns what differs between devices: free memory, and the wait for work that was only queued. Must not know models or blocks.
Invariant: after `settle` no queued work touches the KV memory any more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.host import available_memory
from services.engine.torch_engine.pool_size import Room
from services.settings.errors import SettingsError
from services.settings.worker import WorkerSettings

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_GPU_FRACTION = 0.8
"""Of what is free on a GPU beside the weights: nobody else lives there, but a step needs room for what it computes."""


@dataclass(frozen=True, slots=True)
class Place:
    """`staged`: the KV lies in memory that a transfer cannot read, so blocks move through a copy on the host."""

    device: torch.device
    dtype: torch.dtype
    staged: bool = False

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def numerics(self) -> str:
        """The same name only where the same bits may be expected."""
        return self.dtype_name if self.device.type == "cpu" else f"{self.dtype_name} {self.device.type}"

    def room(self, weights: int) -> Room:
        """What is free for the KV pool beside `weights` bytes. A staged pool takes as much of the host, where it is used."""
        if self.device.type == "cpu":
            return Room(available_memory(), own=weights)
        free, _ = torch.cuda.mem_get_info(self.device)
        return Room(free, own=weights, fraction=_GPU_FRACTION, most=available_memory() // 2)


CPU = Place(torch.device("cpu"), torch.float32)


def choose(settings: WorkerSettings) -> Place:
    """The place that the settings ask for. Raises `SettingsError`: there is no such device."""
    has_gpu = settings.device != "cpu" and torch.cuda.is_available()
    if settings.device == "cuda" and not has_gpu:
        raise SettingsError("worker.device: there is no CUDA device here, or this torch was built without CUDA")
    dtype = _DTYPES.get(settings.dtype, torch.bfloat16 if has_gpu else torch.float32)
    return Place(torch.device("cuda"), dtype, staged=True) if has_gpu else Place(CPU.device, dtype)


def to_host(logits: Tensor) -> Tensor:
    """`logits` as float32 on the host; from a GPU they are there after `settle`."""
    if logits.device.type == "cpu":
        return logits.float()
    host = torch.empty(logits.shape, dtype=torch.float32, pin_memory=True)
    return host.copy_(logits, non_blocking=True)


def settle(device: torch.device) -> None:
    """Wait, without the GIL, until all that this thread has queued on `device` is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
