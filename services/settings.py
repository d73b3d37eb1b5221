"""Settings of every process: `HEADRACE_*` variables over one `headrace.toml` over defaults.

Nested keys use two underscores (`HEADRACE_EDGE__PORT`). A key that does not exist or a value that does not fit is an error that
names the key. The file is `$HEADRACE_CONFIG`, else `./headrace.toml` when there is one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from schemas.codec import OLDEST_SCHEMA, SCHEMA
from services.selection import SelectionSettings, check

ENV_PREFIX = "HEADRACE_"
LONGEST_S = 1e7
"""Seconds, four months: no delay of ours is longer, and every timer takes it."""
LARGEST = 2**31 - 1
"""No count of ours is larger, so that each fits into any message."""
Seconds = Annotated[float, Field(gt=0, le=LONGEST_S)]


def _host(text: str) -> str:
    text.encode("idna")  # raises UnicodeError, a ValueError, where the resolver would
    return text


def _at_home(path: TextOrPath) -> TextOrPath:
    try:
        Path(path).expanduser()
    except RuntimeError as error:  # of ~nobody
        raise ValueError(str(error)) from None
    return path


TextOrPath = TypeVar("TextOrPath", str, Path)
Host = Annotated[str, AfterValidator(_host)]
Name = Annotated[str, Field(min_length=1), AfterValidator(_at_home)]
Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]
STORE_SCHEMES = ("s3", "gs", "az", "abfs", "abfss", "file")
_OTHER_VARIABLES = frozenset({"HEADRACE_CONFIG", "HEADRACE_URL"})


class SettingsError(Exception):
    """Names each key that is wrong, and why."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NatsSettings(_Section):
    """How to reach NATS. Each process connects as its role's user.

    `url`: one server, or all of a cluster with commas between them. `replicas`: servers that keep each stream and bucket, no more
    than the cluster has. `account`: the server account that our processes log in to, when it imports the system account's
    DISCONNECT advisory (infra/nats/permissions.conf); "" = routers do without.
    """

    url: str = "nats://127.0.0.1:4222"
    user: str = ""
    password: str = ""
    prefix: str = Field("hr", pattern=r"^[a-z][a-z0-9_]*$")
    connect_timeout_s: Seconds = 10.0
    replicas: int = Field(1, ge=1, le=5)
    account: str = Field("", pattern=r"^[A-Za-z0-9_-]*$")

    @field_validator("url")
    @classmethod
    def _names_servers(cls, url: str) -> str:
        servers = [server for server in url.split(",") if server.strip()]
        parts = [urlsplit(server if "://" in server else f"nats://{server.strip()}") for server in servers]  # raises ValueError
        if not parts or not all(_host(part.hostname or "") and part.port != 0 for part in parts):
            raise ValueError("no server is named")
        return url

    @property
    def servers(self) -> list[str]:
        """Each server's URL."""
        return [server.strip() for server in self.url.split(",") if server.strip()]


class EdgeSettings(_Section):
    """The HTTP edge. `max_body_bytes` bounds a request before it is parsed.

    `admin_host`, `admin_port`: where metrics and probes are answered, without a key; 0 = a free port, told in the log.
    `max_connections` are open at once; on each, headers have to be whole within `header_deadline_s`, counted from the end of the
    request before: longer than the 60 s for which proxies commonly keep a connection that they may use again.
    `open_on_loopback`: callers on this machine need no API key.
    `database_url` "" = a SQLite file in the home folder. `detached_jobs`: how many one edge holds at once; `detached_keep_s` and
    `detached_keep_mb`: how long, and how much all together, of those that ended is kept. `responses_keep_days`: how long stored
    responses are; `usage_keep_days`: how long the rows of the usage ledger, and what was spent of each day's and month's budgets.
    `max_choices` bounds a request's `n`; `max_generated_tokens` what all its choices together may generate, if it has several;
    `max_prompt_logprobs` log-probabilities of one prompt, alternatives included;
    `price_per_compute_s`: what a second of compute costs, in any currency; unset = `usage` has no cost.
    `model_prices`: the same by model, where it differs.
    `max_nats_requests` how many requests that came over NATS run at once.
    """

    host: Host = "127.0.0.1"
    open_on_loopback: bool = True
    port: int = Field(8000, ge=0, le=65535)
    admin_host: Host = "127.0.0.1"
    admin_port: int = Field(0, ge=0, le=65535)
    max_connections: int = Field(16_384, gt=0, le=LARGEST)
    header_deadline_s: Seconds = 75.0
    max_body_bytes: int = Field(4 * 2**20, gt=0, le=LARGEST)
    max_stops: int = Field(16, ge=4, le=LARGEST)
    submit_timeout_s: Seconds = 0.3
    queue_deadline_s: Seconds = 30.0
    first_token_deadline_s: Seconds = 120.0
    total_deadline_s: Seconds = 600.0
    body_deadline_s: Seconds = 30.0
    keep_alive_s: Seconds = 10.0
    write_deadline_s: Seconds = 30.0
    default_max_tokens: int | None = Field(None, gt=0, le=LARGEST)
    max_choices: int = Field(16, ge=1, le=128)
    max_generated_tokens: int = Field(2**17, gt=0, le=LARGEST)
    max_prompt_logprobs: int = Field(2**17, gt=0, le=LARGEST)
    max_nats_requests: int = Field(256, gt=0, le=LARGEST)
    price_per_compute_s: Price | None = None
    model_prices: Mapping[str, Price] = Field(default_factory=dict)
    drain_timeout_s: Seconds = 30.0
    database_url: str = ""
    detached_jobs: int = Field(1024, ge=0, le=LARGEST)
    detached_keep_s: Seconds = 600.0
    detached_keep_mb: int = Field(64, gt=0, le=LARGEST)
    responses_keep_days: Seconds = 30.0
    usage_keep_days: float = Field(400.0, ge=40, le=LONGEST_S)

    @model_validator(mode="after")
    def _two_ports(self) -> EdgeSettings:
        """The server takes a port that is in use: callers would be answered by either."""
        if self.port and self.port == self.admin_port:
            raise ValueError(f"admin_port: {self.port} is edge.port already")
        return self

    def price(self, model: str) -> float | None:
        """Of a second of compute; None = not set."""
        return self.model_prices.get(model, self.price_per_compute_s)


class RouterSettings(_Section):
    """`answer_within_s`: a submit is given up after this. `drain_timeout_s`: for the placements in flight at the end."""

    answer_within_s: Seconds = 0.25
    queue_poll_s: Seconds = 0.1
    drain_timeout_s: Seconds = 2.0


class ScriptedSettings(_Section):
    """The engine that plays fixed token ids. `scripts` is a JSON file, see services/engine/scripted.py.

    `numerics` goes into `kv_compat`, so that two builds of equal weights can differ, as engines do. `n`: several choices in one
    run; without it an edge makes a job of each, as for TensorRT-LLM.
    """

    scripts: Path | None = None
    prefill_token_s: float = Field(0.0, ge=0, le=LONGEST_S)
    decode_step_s: float = Field(0.0, ge=0, le=LONGEST_S)
    block_tokens: int = Field(16, gt=0, le=LARGEST)
    block_bytes: int = Field(4096, ge=128, le=LARGEST)
    numerics: str = "exact"
    n: bool = True


class TrtllmSettings(_Section):
    """The TensorRT-LLM engine (docs/tensorrt_llm.md), for which these stand in the place of what `worker` says of computing.

    `kv_fraction`: of the GPU memory that the weights leave. `block_tokens`: TensorRT-LLM's tokens_per_block. `step_tokens`: its
    max_num_tokens; `max_batch`: its max_batch_size. `max_context`: tokens of prompt and answer, unset = the model's.
    `quantization`: what the checkpoint must say, "" = whatever it says; `kv_dtype`: of the KV cache.
    `speculative`: its speculative_config, `decoding_type` and the fields that goes with; empty = none.
    `guided_decoding`: the backend of constrained output, "" = none is offered. `adapters`: LoRA adapters by name, each a folder.
    `transceiver`: the backend that moves KV; `transfer_timeout_s`: when it gives up a handoff that nobody fetched. It is a
    backstop, well above the longest transfer. `event_buffer`: KV cache events kept until they are read.
    `shutdown_timeout_s`: the longest an engine may take to end. `extra`: arguments of its LLM class that no key here stands for.
    """

    tensor_parallel: int = Field(1, ge=1, le=1024)
    pipeline_parallel: int = Field(1, ge=1, le=1024)
    dtype: Literal["auto", "bfloat16", "float16"] = "auto"
    quantization: str = ""
    kv_fraction: float = Field(0.9, gt=0, lt=1)
    kv_dtype: Literal["auto", "fp8", "nvfp4"] = "auto"
    block_tokens: int = Field(32, ge=1, le=1024)
    block_reuse: bool = True
    chunked_prefill: bool = True
    max_batch: int = Field(256, gt=0, le=LARGEST)
    step_tokens: int = Field(8192, gt=0, le=LARGEST)
    max_context: int | None = Field(None, gt=1, le=LARGEST)
    speculative: dict[str, Any] = {}
    guided_decoding: Literal["", "xgrammar", "llguidance"] = ""
    adapters: dict[str, Path] = {}
    max_adapter_rank: int = Field(64, gt=0, le=1024)
    transceiver: Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"] = "DEFAULT"
    transfer_timeout_s: Seconds = 60.0
    event_buffer: int = Field(2**16, gt=0, le=LARGEST)
    shutdown_timeout_s: Seconds = 20.0
    extra: dict[str, Any] = {}


class WorkerSettings(_Section):
    """One worker. `kv_blocks` 0 = from `kv_memory_mb`; that 0 = from the memory that is free.

    `device`: auto = a GPU where there is one. `dtype`: of weights and KV in torch, auto = bfloat16 on a GPU; on a CPU to choose
    one is to choose pure torch, not the C kernel.
    `kv_swap_mb`: memory for the KV of preempted runs, beside the pool; 0 = none, unset = a part of the pool's size.
    `threads`: cores that one step uses at most, 0 = all there are. `machine_workers`: how many workers of this machine share its
    memory (and its cores, where the engine has no arbiter); `headrace up` tells them.
    `speculative_tokens`: guess so many tokens ahead of each sequence by prompt lookup, 0 = none.
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


class StoreSettings(_Section):
    """Where models are fetched from when a process starts. `url`: a place that holds one folder a model (s3://bucket/prefix,
    gs://…, az://…, file:///… or an absolute path); "" = models are on this machine. Credentials and endpoints come from the
    environment, as the cloud's own tools read them.

    `stall_s`: a read that brings nothing for so long is made again. `retry_s`: trouble that lasts longer ends the start, and so
    does a fetch that takes longer than `deadline_s`; the next start goes on where it ended. `parallel`: reads at once.
    """

    url: str = ""
    stall_s: Seconds = 15.0
    retry_s: Seconds = 60.0
    deadline_s: Seconds = 3600.0
    parallel: int = Field(8, ge=1, le=256)

    @field_validator("url")
    @classmethod
    def _is_a_place(cls, url: str) -> str:
        parts = urlsplit(url)  # raises ValueError
        if not url or (not parts.scheme and url.startswith("/")):
            return url
        if parts.scheme not in STORE_SCHEMES:
            raise ValueError(f"a URL of {', '.join(STORE_SCHEMES)}, or an absolute path")
        if parts.query or parts.fragment or "@" in parts.netloc:
            raise ValueError("no credentials and no query: those come from the environment")
        if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
            raise ValueError("file:///absolute/path")
        if parts.scheme != "file" and not parts.netloc:
            raise ValueError(f"{parts.scheme}://bucket/prefix")
        return url.rstrip("/")


class Settings(BaseSettings):
    """`model`: what a worker computes. `models`: all that edges serve, when there are several; the first is the default.

    `schema_version`: the newest message version this process reads and writes. Before a fleet goes back to the build
    before this one, set it to that build's everywhere. `alive_file`: touched every 2 s by the event loop of a service,
    for health checks of containers."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, env_ignore_empty=True
    )

    home: Annotated[Path, AfterValidator(_at_home)] = Path("~/.cache/headrace")
    model: Name = "smollm2-135m-instruct"
    models: Annotated[tuple[Name, ...], NoDecode] = ()
    schema_version: int = Field(SCHEMA, ge=OLDEST_SCHEMA, le=SCHEMA)
    alive_file: Path | None = None
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    nats: NatsSettings = NatsSettings()
    edge: EdgeSettings = EdgeSettings()
    router: RouterSettings = RouterSettings()
    worker: WorkerSettings = WorkerSettings()
    scripted: ScriptedSettings = ScriptedSettings()
    trtllm: TrtllmSettings = TrtllmSettings()
    store: StoreSettings = StoreSettings()
    selection: SelectionSettings = SelectionSettings()

    @field_validator("models", mode="before")
    @classmethod
    def _listed(cls, models: Any) -> Any:
        """As a variable: names with commas between them, or a JSON array."""
        if not isinstance(models, str):
            return models
        return json.loads(models) if models.startswith("[") else [name.strip() for name in models.split(",")]

    @model_validator(mode="after")
    def _one_of_its_models(self) -> Settings:
        if self.models and self.model not in self.models:
            if "model" in self.model_fields_set:
                raise ValueError(f"model: {self.model!r} is none of `models`: {', '.join(self.models)}")
            object.__setattr__(self, "model", self.models[0])  # frozen for everybody else
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, _config_file())

    @property
    def home_dir(self) -> Path:
        """`home` with `~` resolved."""
        return self.home.expanduser()

    @property
    def served(self) -> tuple[str, ...]:
        """The models that edges serve, as they were given: names, or folders."""
        return self.models or (self.model,)

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names by which callers and subjects know them."""
        return tuple(model_path(self.home_dir, model).resolve().name for model in self.served)


def is_folder(model: str) -> bool:
    """Whether a model is given as a path, and not by its name."""
    return os.sep in model or model.startswith((".", "~"))


def model_path(home: Path, model: str) -> Path:
    """Where a model lies or will lie: a name is looked up under `home`, anything with a slash is a folder."""
    return Path(model).expanduser() if is_folder(model) else home / "models" / model


def load() -> Settings:
    """The settings of this process. Raises `SettingsError`."""
    path = _config_file()
    unknown = sorted(name for name in os.environ if name.startswith(ENV_PREFIX) and not _known(name))
    if unknown:
        raise SettingsError(f"wrong settings: unknown variable {', '.join(unknown)}")
    if os.environ.get("HEADRACE_CONFIG") and not path.is_file():
        raise SettingsError(f"HEADRACE_CONFIG: there is no file {path}")
    try:
        settings = Settings()
    except ValidationError as error:
        raise SettingsError("wrong settings: " + "; ".join(map(_line, error.errors()))) from None
    except (ValueError, RecursionError) as error:  # a headrace.toml that is not TOML
        raise SettingsError(f"{path}: {error}") from None
    if key := next((key for key, text in _texts(settings.model_dump()) if "\0" in text), None):
        raise SettingsError(f"wrong settings: {key}: holds a NUL, which no name and no path can")
    _check_models(settings)
    return settings


def _check_models(settings: Settings) -> None:
    """Whether all that is said of models is of models there are. Raises `SettingsError`."""
    names = settings.served_names
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    unpriced = next((name for name in settings.edge.model_prices if name not in names), None)
    if twice is not None:
        raise SettingsError(f"wrong settings: models: two are called {twice!r}")
    if unpriced is not None:
        raise SettingsError(f"wrong settings: edge.model_prices.{unpriced}: there is no such model; there are {', '.join(names)}")
    try:
        check(settings.selection, names)
    except ValueError as error:
        raise SettingsError(f"wrong settings: {error}") from None


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text and path in `value`, with the key of each."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from ((key, str(name)), *_texts(inner, f"{key}.{name}".lstrip(".")))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, key)
    elif isinstance(value, str | Path):
        yield key, str(value)


def _line(item: ErrorDetails) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"unknown key {key}"
    return f"{key}: {item['msg']}" if key else str(item["msg"]).removeprefix("Value error, ")


def _known(variable: str) -> bool:
    """Whether a variable is a setting or one of the few that are not; keys of sections are checked with their section."""
    return variable in _OTHER_VARIABLES or variable.removeprefix(ENV_PREFIX).split("__")[0].lower() in Settings.model_fields


def _config_file() -> Path:
    return Path(os.environ.get("HEADRACE_CONFIG", "headrace.toml"))
