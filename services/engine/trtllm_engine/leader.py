"""Who of several processes of one engine is the worker: the leader, rank 0 of its MPI job. It alone is on the bus.

On one machine TensorRT-LLM starts the other ranks itself. Over several, `trtllm-llmapi-launch headrace worker …` under mpirun or
srun runs our command on rank 0 alone, without what MPI says in its environment, and makes the other processes its ranks
(NVIDIA/TensorRT-LLM, tensorrt_llm/llmapi/trtllm-llmapi-launch). Without that launcher every rank would become a worker of its
own, each with the whole model, or the first would wait for ranks that are none: that is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.settings.errors import SettingsError

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PMI_ID", "SLURM_PROCID")
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
LAUNCHED = "TLLM_SPAWN_PROXY_PROCESS"
"""The launcher sets it; the engine then uses the ranks that are there instead of starting any."""
_HOW = "start multi-node engines with trtllm-llmapi-launch"


def must_lead(environment: Mapping[str, str]) -> None:
    """Raises `SettingsError` in a process that is not rank 0, and in one of several that no launcher started."""
    for name in _RANKS:
        if environment.get(name, "0") != "0":
            raise SettingsError(f"worker.engine: this is rank {environment[name]} ({name}); {_HOW}")
    for name in _SIZES:
        if environment.get(name, "1") != "1" and LAUNCHED not in environment:
            raise SettingsError(f"worker.engine: this is one of {environment[name]} processes ({name}); {_HOW}")
