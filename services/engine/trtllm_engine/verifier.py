"""Compares an installed `tensorrt_llm` with the recorded contract by reading its source: nothing is imported, no GPU is needed.

Run at every start of a worker with this engine, and by hand (`headrace verify trtllm`). Invariant: what was not read is never
called passed: without the package the verdict is *skipped*.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from services.engine.trtllm_engine import contract
from services.engine.trtllm_engine.contract import NO_DEFAULT, Parameter
from services.engine.trtllm_engine.findings import Finding, Report
from services.engine.trtllm_engine.source import Source, signature

PACKAGE = "tensorrt_llm"
_SIGNS = ("__init__.py", "version.py", "llmapi")
"""Of a package; one that has only a part of them is broken, not absent."""


def find() -> Path | None:
    """The folder of the installed package, None when there is none. A package that is only found is not run."""
    spec = importlib.util.find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def verify(package: Path | None) -> Report:
    """What contradicts the contract in the package at `package`. A file that cannot be read contradicts it, too.

    A folder without anything of it is no package: PyPI's own 1.2.1 is a stub, and what was removed may leave folders behind.
    """
    if package is None or not any((package / name).exists() for name in _SIGNS):
        return Report(found=False)
    return Report(tuple(_findings(_Files(package))))


class _Files:
    """The package's files, each parsed once; a missing one is empty, so that each fact in it is found missing."""

    def __init__(self, package: Path) -> None:
        self._package = package
        self._parsed: dict[str, Source | None] = {}

    def get(self, name: str) -> Source | None:
        if name not in self._parsed:
            try:
                self._parsed[name] = Source(self._package / name)
            except (OSError, ValueError):
                self._parsed[name] = None
        return self._parsed[name]


def _findings(files: _Files) -> Iterator[Finding]:
    yield _version(files)
    for fact, file, owner, method in (
        (contract.LLM_FACT, "llmapi/llm.py", "LLM", "__init__"),
        (contract.GENERATE, "llmapi/llm.py", "LLM", "generate_async"),
        ("llmapi.LLM.get_stats_async", "llmapi/llm.py", "LLM", "get_stats_async"),
        ("llmapi.LLM.get_kv_cache_events_async", "llmapi/llm.py", "LLM", "get_kv_cache_events_async"),
        ("llmapi.LLM.shutdown", "llmapi/llm.py", "LLM", "shutdown"),
    ):
        yield _method(fact, files.get(file), owner, method)
    for fact, file, owner in (
        (contract.DISAGGREGATED, "disaggregated_params.py", "DisaggregatedParams"),
        (contract.COMPLETION, "executor/result.py", "CompletionOutput"),
        (contract.SAMPLING, "sampling_params.py", "SamplingParams"),
        ("llmapi.GuidedDecodingParams", "sampling_params.py", "GuidedDecodingParams"),
        (contract.TRANSCEIVER, "llmapi/llm_args.py", "CacheTransceiverConfig"),
        (contract.KV_CACHE, "llmapi/llm_args.py", "KvCacheConfig"),
        (contract.ARGS_EXACT, "llmapi/llm_args.py", "TorchLlmArgs"),
        (contract.ARGS_NEAR, "llmapi/llm_args.py", "TorchLlmArgs"),
        (contract.SPECULATIVE_BASE, "llmapi/llm_args.py", "DecodingBaseConfig"),
        *((f"llmapi.{name}", "llmapi/llm_args.py", name) for name in contract.SPECULATIVE.values()),
        (contract.LORA_REQUEST, "executor/request.py", "LoRARequest"),
        (contract.LORA_CONFIG, "lora_helper.py", "LoraConfig"),
    ):
        yield _fields(fact, files.get(file), owner)
    yield _result(files.get("executor/result.py"))
    yield _request_error(files.get("executor/utils.py"))
    yield _event_keys(files.get("_utils.py"))
    yield _overlap(files.get("executor/base_worker.py"))


def _version(files: _Files) -> Finding:
    source = files.get("version.py")
    said = None if source is None else source.assigned("__version__")
    return Finding("version", () if said == contract.VERSION else (f"version.py says {said!r}, not {contract.VERSION}",))


def _method(fact: str, source: Source | None, owner: str, method: str) -> Finding:
    function = source.method(owner, method) if source is not None else None
    if function is None:
        return Finding(fact, ("not found",))
    found = signature(function)
    wrong = list(_differences(fact, found))
    recorded = [parameter.name for parameter in contract.parameters(fact)]
    if not wrong and [parameter.name for parameter in found][: len(recorded)] != recorded:
        wrong.append("its parameters come in another order")
    return Finding(fact, tuple(wrong), _unrecorded(fact, found))


def _fields(fact: str, source: Source | None, owner: str) -> Finding:
    if source is None or not source.has_class(owner):
        return Finding(fact, (f"class {owner} not found",))
    found = source.fields(owner)
    differences = tuple(_differences(fact, found))
    options = source.dataclass_options(owner)
    wrong = [f"dataclass is not {key}={value}" for key, value in _options(fact).items() if options.get(key) != value]
    missing = [text for text in differences if text.endswith(_MISSING)]
    defaults = [text for text in differences if not text.endswith(_MISSING)]
    if contract.exact(fact):
        return Finding(fact, tuple(wrong + missing + defaults), _unrecorded(fact, found))
    return Finding(fact, tuple(wrong + missing), tuple(defaults))  # defaults of a neighbouring version: every one we need is set


_MISSING = " is missing"


def _options(fact: str) -> dict[str, bool]:
    recorded = contract.fact(fact).get("dataclass", {})
    return {key: value for key, value in recorded.items() if isinstance(value, bool)}


def _differences(fact: str, found: tuple[Parameter, ...]) -> Iterator[str]:
    by_name = {parameter.name: parameter for parameter in found}
    for recorded in contract.parameters(fact):
        here = by_name.get(recorded.name)
        if here is None:
            yield recorded.name + _MISSING
        elif recorded.default is not NO_DEFAULT and here.default is not NO_DEFAULT and here.default != recorded.default:
            yield f"{recorded.name} defaults to {here.default!r}, not {recorded.default!r}"
    for absent in contract.fact(fact).get("absent_in_1.2.1", ()):
        if absent in by_name:
            yield f"{absent} is there, which 1.2.1 has not"


def _unrecorded(fact: str, found: tuple[Parameter, ...]) -> tuple[str, ...]:
    if fact in (contract.ARGS_EXACT, contract.ARGS_NEAR):
        return ()  # only a part of that class was recorded
    known = contract.names(fact) | (contract.names(contract.SPECULATIVE_BASE) if fact.endswith("DecodingConfig") else frozenset())
    return tuple(f"{parameter.name} is not recorded" for parameter in found if parameter.name not in known)


def _result(source: Source | None) -> Finding:
    recorded = contract.fact(contract.RESULT)
    members = source.members("GenerationResult") if source is not None else frozenset[str]()
    methods = [name for name in recorded["methods"] if name != "clear_logprob_params"]
    needed = [*recorded["properties"], *methods, "cached_tokens"]
    return Finding(contract.RESULT, tuple(f"{name} is missing" for name in needed if name not in members))


def _request_error(source: Source | None) -> Finding:
    same = source is not None and source.bases("RequestError") == (contract.fact(contract.REQUEST_ERROR)["base"],)
    return Finding(contract.REQUEST_ERROR, () if same else ("not found with its base",))


def _event_keys(source: Source | None) -> Finding:
    """The serialiser's keys are strings in its source."""
    if source is None or not source.has_class("KVCacheEventSerializer"):
        return Finding("kv event json", ("class KVCacheEventSerializer not found",))
    keys = ("event_id", "data", "window_size", "parent_hash", "block_hash", "block_hashes", "tokens", "token_id", "cache_level")
    return Finding("kv event json", tuple(f"{key} is missing" for key in keys if f'"{key}"' not in source.text))


def _overlap(source: Source | None) -> Finding:
    text = contract.fact("overlap refusal")["text"]
    same = source is not None and text in source.text
    return Finding("overlap refusal", notes=() if same else (f"base_worker.py does not say {text!r}",))
