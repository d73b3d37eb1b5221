"""A bucket of readable JSON values that vanish when their owner stops renewing them: `nats kv ls|get|watch HR_WORKERS`.

Written straight to `$KV.<bucket>.<key>` with `Nats-TTL`, because nats-py's `put` cannot give a key a TTL. The bucket
leaves a marker with an empty value where a key expired, so that watchers hear of it; nats-py's `get` shows that marker as
an entry, ours does not. Must not know what the values mean.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Callable

import msgspec

from schemas.codec import encode_json
from schemas.errors import BusUnavailable, NobodyListens
from services.bus.interface import Msg, Subscription
from services.bus.jetstream import MESSAGE_NOT_FOUND, NS, STREAM_NOT_FOUND, ApiError, JetStream, ttl_header

TTL_S = 10.0
MARKER_TTL_S = 60
_KEY = re.compile(r"^[-/_=.a-zA-Z0-9]+$")


class KvRegistry:
    """One bucket. Every method raises `BusUnavailable` within its deadline when JetStream cannot be reached."""

    def __init__(
        self, js: JetStream, bucket: str, *, ttl_s: float = TTL_S, about: str = "Headrace: who is there; a hint for people"
    ) -> None:
        self._js = js
        self._about = about
        self._bucket = bucket
        self._ttl_s = ttl_s

    async def ensure(self) -> None:
        """Create the bucket, or bring it up to date; repeating it is harmless."""
        config = {
            "name": f"KV_{self._bucket}",
            "description": self._about,
            "subjects": [f"$KV.{self._bucket}.>"],
            "storage": "memory",
            "max_msgs_per_subject": 1,
            "discard": "new",
            "allow_rollup_hdrs": True,
            "deny_delete": True,
            "allow_direct": True,
            "allow_msg_ttl": True,
            "subject_delete_marker_ttl": MARKER_TTL_S * NS,
        }
        try:
            await self._js.ensure_stream(config)
        except ApiError as error:
            raise BusUnavailable(f"JetStream: {error}") from error

    async def put(self, key: str, value: msgspec.Struct | dict[str, object]) -> None:
        """`key` says `value` for the next `ttl_s` seconds. Makes the bucket when it is gone."""
        data, headers = encode_json(value), {"Nats-TTL": ttl_header(self._ttl_s)}
        try:
            await self._store(key, data, headers)
        except NobodyListens:
            await self.ensure()
            await self._store(key, data, headers)

    async def remove(self, key: str) -> None:
        """A clean goodbye: watchers see a delete at once."""
        headers = {"KV-Operation": "PURGE", "Nats-Rollup": "sub", "Nats-TTL": ttl_header(MARKER_TTL_S)}
        await self._store(key, b"", headers)

    async def get(self, key: str) -> bytes | None:
        """The JSON under `key`; None when it never was, was removed or expired (an empty value is a marker)."""
        try:
            answer = await self._js.api(f"STREAM.MSG.GET.KV_{self._bucket}", {"last_by_subj": self._subject(key)})
        except ApiError as error:
            if error.err_code == MESSAGE_NOT_FOUND:
                return None
            raise BusUnavailable(f"JetStream: {error}") from error
        return b64decode(answer["message"].get("data") or "") or None

    async def entries(self) -> dict[str, bytes]:
        """Every key that has a value now."""
        body = {"subjects_filter": f"$KV.{self._bucket}.>"}
        try:
            info = await self._js.api(f"STREAM.INFO.KV_{self._bucket}", body)
        except ApiError as error:
            if error.err_code == STREAM_NOT_FOUND:
                return {}
            raise BusUnavailable(f"JetStream: {error}") from error
        keys = [subject.removeprefix(f"$KV.{self._bucket}.") for subject in info["state"].get("subjects") or {}]
        found = {key: await self.get(key) for key in keys}
        return {key: value for key, value in found.items() if value is not None}

    async def watch(self, changed: Callable[[str, bytes | None], None]) -> Subscription:
        """Call `changed` with each key that is put from now on, with None for one that is removed; not when one expires.

        Core NATS: what is put while the connection is down is missed. Raises `Disconnected`.
        """
        prefix = f"$KV.{self._bucket}."

        def heard(msg: Msg) -> None:
            removed = not msg.data or "KV-Operation" in msg.headers
            changed(msg.subject.removeprefix(prefix), None if removed else msg.data)

        return await self._js.bus.subscribe(f"{prefix}*", heard)

    async def _store(self, key: str, data: bytes, headers: dict[str, str]) -> None:
        try:
            await self._js.store(self._subject(key), data, headers)
        except ApiError as error:
            raise BusUnavailable(f"JetStream: {error}") from error

    def _subject(self, key: str) -> str:
        if not _KEY.match(key):
            raise ValueError(f"not a key: {key!r}")
        return f"$KV.{self._bucket}.{key}"
