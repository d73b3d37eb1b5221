"""All settings of a process: variables over one file over defaults.

Nested keys use two underscores (`HEADRACE_EDGE__PORT`). The file is `$HEADRACE_CONFIG`, else `./headrace.toml` when there is one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from schemas.codec import OLDEST_SCHEMA, SCHEMA
from services.settings.edge import EdgeSettings
from services.settings.file import ConfigFile
from services.settings.model_path import model_path
from services.settings.nats import NatsSettings
from services.settings.router import RouterSettings
from services.settings.scripted import ScriptedSettings
from services.settings.section import Section, at_home
from services.settings.selection import SelectionSettings
from services.settings.store import StoreSettings
from services.settings.trtllm import TrtllmSettings
from services.settings.worker import WorkerSettings

ENV_PREFIX = "HEADRACE_"
Name = Annotated[str, Field(min_length=1), AfterValidator(at_home)]


class Settings(BaseSettings, Section):
    """`model`: what a worker computes. `models`: all that edges serve, when there are several; the first is the default.

    `schema_version`: the newest message version this process reads and writes. Before a fleet goes back to the build
    before this one, set it to that build's everywhere. `alive_file`: touched every 2 s by the event loop of a service,
    for health checks of containers."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, env_ignore_empty=True
    )

    home: Annotated[Path, AfterValidator(at_home)] = Path("~/.cache/headrace")
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
        return init_settings, env_settings, ConfigFile(settings_cls, config_file())

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


def config_file() -> Path:
    return Path(os.environ.get("HEADRACE_CONFIG", "headrace.toml"))
