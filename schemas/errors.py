"""The one exception tree, mapped once to (HTTP status, type, code, retry_after).

Every failure that a caller can see is a `HeadraceError`. Its `code` is what travels in `Event.error_code` and
`Refused.code`; `from_code` turns it back into the exception at the edge. Messages are shown to callers, so they
never hold a path, an address or another tenant's data; they may repeat what a caller sent, so their length is bounded: a refusal
is never larger than a message may be.
"""

from __future__ import annotations

import math
from typing import ClassVar

_LONGEST_MESSAGE, _LONGEST_PARAM = 1000, 200
_TELL_WHEN = (429, 503)


class HeadraceError(Exception):
    """Base. `status`, `type` and `code` are OpenAI's error envelope; `retry_after` is in seconds, or None."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = _cut(message, _LONGEST_MESSAGE)
        self.param = None if param is None else _cut(param, _LONGEST_PARAM)
        self.retry_after = retry_after

    @property
    def wait(self) -> int | None:
        """The header `Retry-After`: whole seconds, None = not told. A 429 or 503 always tells, whoever raised it."""
        if self.retry_after is None:
            return 1 if self.status in _TELL_WHEN else None
        return max(1, math.ceil(self.retry_after))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


class InvalidRequest(HeadraceError):
    """The request itself is wrong; sending it again cannot help."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class EmptyArray(InvalidRequest):
    code = "empty_array"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class UnsupportedParameter(InvalidRequest):
    """The model's engine cannot honour this parameter; it is refused by name instead of ignored."""

    code = "unsupported_parameter"


class InvalidApiKey(InvalidRequest):
    status = 401
    code = "invalid_api_key"


class PermissionDenied(InvalidRequest):
    """Whoever asks may not."""

    status = 403
    code = "permission_denied"


class NotFound(InvalidRequest):
    status = 404
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class PreviousResponseNotFound(NotFound):
    """A response builds on one that is not there. OpenAI's status is 400; ours is that of every id that nobody may probe."""

    code = "previous_response_not_found"


class Gone(InvalidRequest):
    """It was here, and was kept as long as promised."""

    status = 410
    code = "gone"


class MethodNotAllowed(InvalidRequest):
    status = 405
    code = "method_not_allowed"


class PayloadTooLarge(InvalidRequest):
    status = 413
    code = "payload_too_large"


class UnsupportedMediaType(InvalidRequest):
    status = 415
    code = "unsupported_media_type"


class RateLimited(HeadraceError):
    """The caller is over its share of requests."""

    status = 429
    type = "requests"
    code = "rate_limit_exceeded"
    retryable = True


class TokensLimited(RateLimited):
    """The caller is over its share of tokens."""

    type = "tokens"


class InsufficientQuota(HeadraceError):
    """The caller's budget is spent: not before a day or a month is over is there more."""

    status = 429
    type = "insufficient_quota"
    code = "insufficient_quota"


class InternalError(HeadraceError):
    """Something of ours failed. The text is fixed; details are in the log under the request id."""


class OwnersDied(InternalError):
    """The processes that owned a job died, one after another: it is probably the cause."""


class Quarantined(HeadraceError):
    """The same request made the processes that owned it die, a short time ago."""

    code = "request_quarantined"


class Cancelled(HeadraceError):
    """An operator ended it. Clients do not send it again by themselves, as they do after a 5xx."""

    status = 499
    type = "cancelled"
    code = "cancelled"


class ModelChanged(HeadraceError):
    """No worker holds the weights with which a resumed job began."""

    code = "model_changed"


class JobFailed(HeadraceError):
    """A worker's engine failed on this job."""

    code = "job_failed"


class Unavailable(HeadraceError):
    """No capacity now; the same request may succeed after `retry_after` seconds."""

    status = 503
    code = "no_capacity"
    retryable = True


class StoreUnavailable(Unavailable):
    """The database cannot be reached, or did not answer in time."""

    code = "store_unavailable"


class NoWorker(Unavailable):
    """Nobody serves the model now. To a caller that is no capacity."""


class Overloaded(Unavailable):
    code = "overloaded"


class EdgeUnavailable(Unavailable):
    """This edge cannot take it now, whichever model is asked for; another edge may."""


class EdgeFull(Overloaded):
    """This edge is at a limit of its own, whichever model is asked for."""


class ModelLoading(Unavailable):
    code = "model_loading"


class BusUnavailable(Unavailable):
    """NATS cannot be reached."""

    code = "bus_unavailable"


class NobodyListens(BusUnavailable):
    """JetStream, or what of it was asked for, has no server now, as while a new leader is elected: certainly nothing was done."""


class QueueExpired(Unavailable):
    """The job waited for credit until its queue deadline."""

    code = "queue_expired"


class DeadlineExceeded(HeadraceError):
    status = 504
    code = "deadline_exceeded"


class BusError(HeadraceError):
    """Base of what the bus itself reports."""

    status = 503
    code = "bus_error"
    retryable = True


class NoResponders(BusError):
    """Nobody listens on the subject; known at once."""

    code = "no_responders"


class RequestTimeout(BusError):
    """Somebody may have heard the request, nobody answered in time."""

    code = "request_timeout"


class Disconnected(BusError):
    """Our own connection is down; nothing was sent."""

    code = "disconnected"


class MessageTooLarge(BusError):
    """Payload and headers exceed the server's max_payload; nothing was sent."""

    status = 413
    type = "invalid_request_error"
    code = "message_too_large"
    retryable = False


class IllegalSubject(BusError):
    """Not a subject NATS could route; nothing was sent."""

    code = "illegal_subject"
    retryable = False


class UnreadableMessage(HeadraceError):
    """A message that is not what its subject carries. It is refused whole and counted."""

    code = "unreadable_message"


class UnsupportedSchema(UnreadableMessage):
    """A message of a schema version outside the range this process reads."""

    code = "unsupported_schema"


class IllegalTransition(HeadraceError):
    """An attempt's state may only go forward."""

    code = "illegal_transition"


def _tree(root: type[HeadraceError]) -> list[type[HeadraceError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


_BY_CODE: dict[str, type[HeadraceError]] = {}
for _cls in _tree(HeadraceError):
    if _cls.code is not None:
        _BY_CODE.setdefault(_cls.code, _cls)
_BY_CODE["internal_error"] = InternalError


def from_code(code: str, message: str, *, retry_after: float | None = None) -> HeadraceError:
    """The exception a wire `code` stands for; an unknown code is an `InternalError`."""
    return _BY_CODE.get(code, InternalError)(message, retry_after=retry_after)
