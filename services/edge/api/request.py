"""Bodies of the completion endpoints, checked strictly: no coercion, finite numbers, ranges. Null is the same as absent.

Only shapes and ranges here; whether a model can honour a field is `parameters`' question. Fields that are not named are ignored.
Invariant: a body with very many wrong values costs no more than one with a single one: what holds many stops at the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from schemas.errors import InvalidRequest
from services.edge.api import document

LONGEST_STOP = 1024
"""Characters: each choice prepares its own search for each of them."""
_MOST_STOP_TOKENS = 64
_LARGEST_BIAS = 100


def _biases(value: dict[str, Any]) -> dict[str, Any]:
    for token, amount in value.items():
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not abs(amount) <= _LARGEST_BIAS:
            text = f"Each value in 'logit_bias' must be a number from -{_LARGEST_BIAS} to {_LARGEST_BIAS}."
            raise InvalidRequest(text, param=f"logit_bias.{token}")
    return value


Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Biases = Annotated[dict[str, Any], AfterValidator(_biases), document.BIASES]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None


class GenerationRequest(BaseModel):
    """What both endpoints have: how many tokens, how they are drawn, how the answer is sent."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10, allow_inf_nan=False)] | None = None
    logit_bias: Biases | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[Any, document.STOP] = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=_MOST_STOP_TOKENS)] | None = None
    include_stop_str_in_output: bool | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    metadata: Any = None
    service_tier: str | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("'stream_options' needs 'stream' to be true.", param="stream_options")
        return self

    @property
    def portable(self) -> bool:
        """It means the same to every model."""
        return not (self.logit_bias or self.stop_token_ids)

    @property
    def alternatives(self) -> int | None:
        """Log-probabilities of how many alternatives beside the token's own; None: of none."""
        raise NotImplementedError

    @property
    def prompt_alternatives(self) -> int | None:
        """The same of the prompt's tokens: as many as any form of the answer shows."""
        return self.prompt_logprobs

    @property
    def usage_streamed(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[Any, document.MESSAGES] = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Any] | None = None
    tool_choice: Annotated[Any, document.TOOL_CHOICE] = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: Annotated[list[str], Field(fail_fast=True)] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    store: bool | None = None

    @property
    def alternatives(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Annotated[Any, document.PROMPT] = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None

    @property
    def texts(self) -> list[str] | None:
        """The prompts, if all are text."""
        prompts = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        return prompts if all(isinstance(prompt, str) for prompt in prompts) else None

    @property
    def portable(self) -> bool:
        return super().portable and self.texts is not None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompt_alternatives(self) -> int | None:
        if not self.echo or self.logprobs is None:
            return self.prompt_logprobs
        return max(self.logprobs, self.prompt_logprobs or 0)


R = TypeVar("R", bound=BaseModel)


def read_request(kind: type[R], body: dict[str, Any]) -> R:
    """Raises `InvalidRequest` for the first field that is wrong."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = _param(first["loc"])
        raise InvalidRequest(f"Invalid value for '{param}': {first['msg']}.", param=param) from None


@dataclass(frozen=True, slots=True)
class Stops:
    """Strings, each of which ends an answer. `kept`: it stays in the text."""

    strings: tuple[str, ...] = ()
    kept: bool = False


NO_STOPS = Stops()


def read_stops(asked: GenerationRequest, most: int) -> Stops:
    """Raises `InvalidRequest` for anything but null, a string, or up to `most` strings; empty and very long ones are refused."""
    value = asked.stop
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise InvalidRequest("'stop' must be a string or an array of strings.", param="stop")
    if len(stops) > most:
        raise InvalidRequest(f"'stop' may hold at most {most} strings.", param="stop")
    if any(len(stop) > LONGEST_STOP for stop in stops):
        raise InvalidRequest(f"A string in 'stop' may hold at most {LONGEST_STOP} characters.", param="stop")
    if "" in stops:
        raise InvalidRequest("'stop' may not hold an empty string.", param="stop")
    return Stops(tuple(stops), bool(asked.include_stop_str_in_output))


def _param(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
