"""The work queue in JetStream: stream `HR_JOBS`, one durable consumer a filter.

In memory on the server: a job that a server crash loses is submitted again by its edge. A stream or consumer that is gone
is made again by whoever pulls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from schemas.errors import BusUnavailable
from schemas.subjects import JOBS_STREAM, Subjects
from services.bus.interface import Msg
from services.bus.jetstream import (
    CONSUMER_NOT_FOUND,
    MESSAGE_NOT_FOUND,
    NS,
    SEQUENCE_NOT_FOUND,
    STORE_FAILED,
    STREAM_NOT_FOUND,
    ApiError,
    JetStream,
    Json,
    ttl_header,
)
from services.bus.jetstream_pull import Pulls
from services.bus.work_queue import ACK_WAIT_S, MAX_JOBS, Put

DUPLICATE_WINDOW_S = 120
MAX_PAGES = 10
_NOT_THERE = (MESSAGE_NOT_FOUND, SEQUENCE_NOT_FOUND)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class JetStreamItem:
    """A delivered message; its `reply` is the ack subject."""

    _js: JetStream
    _msg: Msg

    @property
    def subject(self) -> str:
        return self._msg.subject

    @property
    def data(self) -> bytes:
        return self._msg.data

    @property
    def headers(self) -> Mapping[str, str]:
        return self._msg.headers

    async def ack(self) -> None:
        await self._js.request(self._msg.reply, b"+ACK")

    async def nak(self) -> None:
        await self._js.request(self._msg.reply, b"-NAK")


class JetStreamWorkQueue:
    """`WorkQueue` over JetStream."""

    def __init__(
        self,
        js: JetStream,
        subjects: Subjects,
        *,
        stream: str = JOBS_STREAM,
        max_jobs: int = MAX_JOBS,
        ack_wait_s: float = ACK_WAIT_S,
    ) -> None:
        self._js = js
        self._stream = stream
        self._config: Json = {
            "name": stream,
            "description": "Headrace: jobs that wait for credit",
            "subjects": [subjects.jobs()],
            "retention": "workqueue",
            "storage": "memory",
            "discard": "new",
            "discard_new_per_subject": True,
            "max_msgs_per_subject": 1,
            "max_msgs": max_jobs,
            "allow_msg_ttl": True,
            "duplicate_window": DUPLICATE_WINDOW_S * NS,
        }
        self._ack_wait_s = ack_wait_s
        self._pulls = Pulls(js)

    async def ensure(self) -> None:
        await self._translate(lambda: self._js.ensure_stream(self._config))

    async def put(
        self,
        subject: str,
        data: bytes,
        *,
        msg_id: str,
        ttl_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Put:
        stamped = {**(headers or {}), "Nats-Msg-Id": msg_id, "Nats-TTL": ttl_header(ttl_s)}
        try:
            ack = await self._js.store(subject, data, stamped)
        except ApiError as error:
            return _not_stored(error)
        return Put.DUPLICATE if ack.get("duplicate") else Put.QUEUED

    async def waiting(self, subject_filter: str) -> dict[str, int]:
        async def page(offset: int) -> Json:
            body = {"subjects_filter": subject_filter, "offset": offset}
            return await self._js.api(f"STREAM.INFO.{self._stream}", body)

        counts: dict[str, int] = {}
        for _ in range(MAX_PAGES):
            info = await self._with_stream(lambda: page(len(counts)))
            found: dict[str, int] = info["state"].get("subjects") or {}
            counts.update(found)
            if not found or len(counts) >= info.get("total", 0):
                break
        return counts

    async def pull(self, subject_filter: str, durable: str) -> JetStreamItem | None:
        msg = await self._pulls.next(self._stream, durable, subject_filter)
        if msg.no_responders or msg.headers.get("Status") == "409":  # no such consumer, or it was deleted meanwhile
            await self._with_stream(lambda: self._create_consumer(subject_filter, durable))
            msg = await self._pulls.next(self._stream, durable, subject_filter)
        return None if "Status" in msg.headers and not msg.data else JetStreamItem(self._js, msg)

    async def purge(self, subject: str) -> bool:
        """Not by STREAM.PURGE: nats-server 2.15's forgets what other jobs' routers gave back to the consumer (tests/bus)."""
        return bool(await self._with_stream(lambda: self._delete(subject)))

    async def _delete(self, subject: str) -> bool:
        try:
            found = await self._js.api(f"STREAM.MSG.GET.{self._stream}", {"last_by_subj": subject})
            numbered = {"seq": found["message"]["seq"], "no_erase": True}
            await self._js.api(f"STREAM.MSG.DELETE.{self._stream}", numbered)
        except ApiError as error:
            if error.err_code in _NOT_THERE:
                return False
            raise
        return True

    async def _create_consumer(self, subject_filter: str, durable: str) -> Json:
        config = {
            "durable_name": durable,
            "filter_subject": subject_filter,
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "ack_wait": int(self._ack_wait_s * NS),
            "max_deliver": -1,  # with a limit, a message that reached it would stay and keep its subject taken
            "mem_storage": True,
        }
        return await self._js.api(
            f"CONSUMER.DURABLE.CREATE.{self._stream}.{durable}", {"stream_name": self._stream, "config": config}
        )

    async def _with_stream(self, call: Callable[[], Awaitable[R]]) -> R:
        """`call()`, and once more after making the stream if that is what was missing."""
        try:
            return await call()
        except ApiError as error:
            if error.err_code not in (STREAM_NOT_FOUND, CONSUMER_NOT_FOUND):
                raise BusUnavailable(f"JetStream: {error}") from error
        await self.ensure()
        return await self._translate(call)

    async def _translate(self, call: Callable[[], Awaitable[R]]) -> R:
        try:
            return await call()
        except ApiError as error:
            raise BusUnavailable(f"JetStream: {error}") from error


def _not_stored(error: ApiError) -> Put:
    """One error code stands for several limits of a stream; only its text tells them apart."""
    if error.err_code == STORE_FAILED and "per subject" in error.text:
        return Put.DUPLICATE
    if error.err_code == STORE_FAILED and "maximum" in error.text:
        return Put.FULL
    raise BusUnavailable(f"JetStream: {error}") from error
