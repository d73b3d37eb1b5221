"""One worker: its engine, its memory, how its KV is reached."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.settings.section import LARGEST, Host, Seconds, Section


class WorkerSettings(Section):
    """One worker. `kv_blocks` 0 = from `kv_memory_mb`; that 0 = from the memory that is free.

    `device`: auto = a GPU where there is one. `dtype`: of weights and KV in torch, auto = bfloat16 on a GPU; on a CPU to choose
    one is to choose pure torch, not the C kernel.
    `kv_swap_mb`: memory for the KV of preempted runs, beside the pool; 0 = none, unset = a part of the pool's size.
    `threads`: cores that one step uses at most, 0 = all there are. `machine_workers`: how many workers of this machine share its
    memory (and its cores, where the engine has no arbiter); `headrace up` tells them.
    `speculative_tokens`: guess so many tokens ahead of each sequence by prompt lookup, 0 = none.
    `max_batch`: sequences that one step decodes at most. `step_tokens`, `step_target_s`: the most prompt tokens of a step, and
    how long it shall take. `transfer`: what carries KV blocks (docs/transfer.md). `transfer_host`: where that listens;
    `transfer_advertise`: the address that peers are told, when another. `drain_timeout_s`: for what runs, after SIGTERM.
    `prefix_cache`: keep full KV blocks for prompts that begin alike, as long as nobody else needs the room.
    """

    engine: Literal["torch", "scripted", "trtllm"] = "torch"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kv_blocks: int = Field(0, ge=0, le=LARGEST)
    kv_memory_mb: int = Field(0, ge=0, le=LARGEST)
    kv_swap_mb: int | None = Field(None, ge=0, le=LARGEST)
    machine_workers: int = Field(1, gt=0, le=LARGEST)
    prefix_cache: bool = True
    max_batch: int = Field(32, gt=0, le=4096)
    step_tokens: int = Field(512, gt=0, le=2**16)
    step_target_s: Seconds = 0.06
    speculative_tokens: int = Field(0, ge=0, le=7)
    threads: int = Field(0, ge=0, le=LARGEST)
    transfer: Literal["auto", "shm", "tcp", "nixl"] = "auto"
    transfer_host: Host = "127.0.0.1"
    transfer_advertise: Host = ""
    drain_timeout_s: Seconds = 30.0
