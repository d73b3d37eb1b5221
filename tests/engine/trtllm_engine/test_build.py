"""From a model's files to an engine: what is refused before weights are loaded, and who may import the package."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from schemas.state import Role
from services.clock import SystemClock
from services.engine.build import build_engine
from services.engine.trtllm_engine.build import build
from services.engine.trtllm_engine.engine import TrtllmEngine
from services.engine.trtllm_engine.leader import must_lead
from services.models.store import ModelFiles
from services.settings.errors import SettingsError
from services.settings.settings import Settings
from services.settings.trtllm import TrtllmSettings
from services.settings.worker import WorkerSettings
from tests.engine.trtllm_engine.configurations import LoRARequest
from tests.engine.trtllm_engine.double import World, api
from tests.engine.trtllm_engine.test_adapters import write_adapter

ROOT = Path(__file__).parents[3]


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300, "max_position_embeddings": 512, "eos_token_id": [0, 7]}))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    return ModelFiles("m", tmp_path, tmp_path / "config.json", tmp_path / "tokenizer.json", None, (), "w")


def made(files: ModelFiles, role: Role = Role.PREFILL, **given: object) -> TrtllmEngine:
    return build(files, TrtllmSettings(**given), SystemClock(), role, lambda: api(World()))  # type: ignore[arg-type]


def test_settings_and_files_become_an_engine(files: ModelFiles) -> None:
    info = made(files, max_batch=7, step_tokens=1000, quantization="fp8").info
    assert (info.name, info.version, info.max_batch, info.step_tokens) == ("tensorrt-llm", "1.2.1", 7, 1000)
    assert (info.vocab_size, info.context_length, info.block_tokens) == (300, 512, 32)
    assert info.eos_ids == {0, 7}


def test_only_equal_engines_are_paired(files: ModelFiles) -> None:
    plain = made(files).info.kv_compat
    assert plain == made(files, Role.DECODE, max_batch=9).info.kv_compat
    assert plain == made(files, extra={"kv_cache_config": {"host_cache_size": 2**30}}).info.kv_compat
    others: list[dict[str, object]] = [
        {"tensor_parallel": 2},
        {"kv_dtype": "fp8"},
        {"block_tokens": 64},
        {"transceiver": "UCX"},
        {"extra": {"kv_cache_config": {"sink_token_length": 4}}},
    ]
    assert len({plain, *(made(files, **other).info.kv_compat for other in others)}) == 6


def test_speculation_and_adapters_reach_the_engine_as_its_own_objects(files: ModelFiles, tmp_path: Path) -> None:
    """It takes no tables: its double refuses them, as pydantic's strict unions do."""
    sql = write_adapter(tmp_path / "sql")
    engine = made(files, speculative={"decoding_type": "NGram", "max_draft_len": 4}, adapters={"sql": sql})
    assert engine.adapters == {"sql": LoRARequest("sql", 1, str(sql))}


def test_engines_of_other_adapters_under_one_name_are_not_paired(files: ModelFiles, tmp_path: Path) -> None:
    folders = [write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b"), write_adapter(tmp_path / "c", weights=b"other")]
    identities = [made(files, adapters={"sql": folder}).info.kv_compat for folder in folders]
    assert identities[0] == identities[1]
    assert len({*identities, made(files).info.kv_compat}) == 3


def test_what_cannot_be_is_named(files: ModelFiles) -> None:
    (files.folder / "config.json").write_text(files.config.read_text().replace("{", '{"num_attention_heads": 32, ', 1))
    with pytest.raises(SettingsError, match=r"trtllm.tensor_parallel: the model's 32 attention heads .* 3 GPUs"):
        made(files, tensor_parallel=3)
    with pytest.raises(SettingsError, match=r"trtllm.quantization: .* says FP8, not nvfp4"):
        made(files, quantization="nvfp4")
    with pytest.raises(SettingsError, match="which is not installed"):
        build_engine(files, Settings(worker=WorkerSettings(engine="trtllm")), SystemClock(), Role.DECODE)


def test_only_the_leader_of_an_engine_is_a_worker() -> None:
    must_lead({})
    must_lead({"OMPI_COMM_WORLD_RANK": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"})
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PMI_ID", "SLURM_PROCID"):
        with pytest.raises(SettingsError, match=f"this is rank 1 .{name}.; start .* with trtllm-llmapi-launch"):
            must_lead({name: "1", "TLLM_SPAWN_PROXY_PROCESS": "1"})


def test_the_first_of_several_processes_leads_only_if_the_launcher_made_the_others_its_ranks() -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        with pytest.raises(SettingsError, match="one of 16 processes"):
            must_lead({name: "16"})
        must_lead({name: "16", "TLLM_SPAWN_PROXY_PROCESS": "1"})


@pytest.mark.parametrize(
    ("listed", "warned"), [("tcp", True), ("rc,sm", True), ("rc,cuda_copy", False), ("all", False), ("^ud", False)]
)
def test_transports_without_gpu_memory_are_warned_of(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, listed: str, warned: bool
) -> None:
    monkeypatch.setenv("UCX_TLS", listed)
    made(files)
    assert any("UCX_TLS" in record.getMessage() for record in caplog.records) == warned


def test_nobody_but_the_adapter_imports_the_package_and_that_one_only_when_it_is_asked_to() -> None:
    for path in [*(ROOT / "services").rglob("*.py"), *(ROOT / "schemas").rglob("*.py")]:
        tree = ast.parse(path.read_text())
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not any(name.split(".")[0] == "tensorrt_llm" for name in imported), path
    named = [path for path in (ROOT / "services").rglob("*.py") if 'import_module("tensorrt_llm' in path.read_text()]
    assert [path.name for path in named] == ["api.py"]
    body = ast.parse(named[0].read_text()).body
    assert not any("import_module" in ast.unparse(node) for node in body if not isinstance(node, ast.FunctionDef))
