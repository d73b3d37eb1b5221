"""Who of several processes of one engine is the worker: the leader, rank 0 of its MPI job. It alone is on the bus.

On one machine TensorRT-LLM starts the other ranks itself. Over several, `trtllm-llmapi-launch headrace worker …` under mpirun or
srun runs our command on rank 0 and makes the others its helpers. Without that launcher every rank would become a worker of its
own, each with the whole model: that is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.settings import SettingsError

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


def must_lead(environment: Mapping[str, str]) -> None:
    """Raises `SettingsError` in a process that is not rank 0."""
    for name in _RANKS:
        if environment.get(name, "0") != "0":
            text = f"worker.engine: this is rank {environment[name]} ({name}); start multi-node engines with trtllm-llmapi-launch"
            raise SettingsError(text)
