"""One place in an object store: read a range, write an object, list folders. The only module that knows `obstore`.

Owns the mapping of the library's errors to three of ours: it is not there, we may not, and trouble that may pass. Credentials
never come from our settings: the library reads the environment as the cloud's own tools do.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from services.models.errors import Forbidden, Missing, ModelError, Trouble
from services.settings.store import StoreSettings

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

T = TypeVar("T")
_CONNECT = timedelta(seconds=5)
_HICCUPS: RetryConfig = {"max_retries": 2, "retry_timeout": timedelta(seconds=10)}
"""What the library mends without a word: one lost request of thousands is no news."""
_NO_LIMIT = timedelta(days=365)
"""Of a whole request: a slow store is slow, a silent one is given up after `stall_s`."""
_SMALL_S = 30.0
"""For a request whose answer is small."""
_PART = 16 * 2**20
_MOST_PARTS = 9_000
_STATUS = re.compile(r"status code: (\d{3})( [A-Za-z ]+)?")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_NO_SUCH_BYTES = "Requested range was invalid"
"""A local store's word for what others call 416."""


class ObjectStore(Protocol):
    """What fetching and publishing need. Every method raises `Missing`, `Forbidden`, or `Trouble`, which may pass."""

    @property
    def url(self) -> str:
        """What messages call it."""
        ...

    async def size(self, path: str) -> int:
        """Bytes of the object."""
        ...

    async def read(self, path: str, start: int, end: int) -> bytes:
        """Bytes [start, end) of the object; fewer when it is shorter."""
        ...

    async def write(self, path: str, content: bytes | Path) -> None:
        """The whole object, or nothing of it."""
        ...

    async def folders(self) -> list[str]:
        """Names of the folders there."""
        ...


def open_bucket(settings: StoreSettings) -> ObjectStore:
    """The store at `settings.url`. Raises `ModelError` for one that cannot be opened here; nothing is sent yet."""
    try:
        from obstore.store import LocalStore, from_url
    except ImportError:
        raise ModelError("store.url needs the extra 'store' (in a checkout: pip install -e '.[store]')") from None
    parts = urlsplit(settings.url)
    if parts.scheme in ("", "file"):
        folder = Path(unquote(parts.path))
        if not folder.is_dir():
            raise ModelError(f"store.url: there is no folder {folder}")
        return Bucket(LocalStore(prefix=folder), settings)
    client: ClientConfig = {
        "connect_timeout": _CONNECT,
        "read_timeout": timedelta(seconds=settings.stall_s),
        "timeout": _NO_LIMIT,
        "allow_http": os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"),
    }
    try:
        return Bucket(from_url(settings.url, client_options=client, retry_config=_HICCUPS), settings)
    except Exception as error:  # whatever the library finds wrong with the environment
        raise ModelError(f"store.url: {settings.url}: {explain(error)}") from None


class Bucket:
    """A store of the library `obstore`."""

    def __init__(self, store: Any, settings: StoreSettings) -> None:
        self._store = store
        self.url = settings.url

    async def size(self, path: str) -> int:
        return int((await self._ask(path, self._store.head_async(path)))["size"])

    async def read(self, path: str, start: int, end: int) -> bytes:
        try:
            return bytes(await self._ask(path, self._store.get_range_async(path, start=start, end=end), within=None))
        except _NoSuchBytes:
            return b""

    async def write(self, path: str, content: bytes | Path) -> None:
        request = self._store.put_async(path, content, chunk_size=_part_bytes(content), max_concurrency=4)
        await self._ask(path, request, within=None)

    async def folders(self) -> list[str]:
        listed = await self._ask("", self._store.list_with_delimiter_async())
        return sorted(str(prefix).rstrip("/").rpartition("/")[2] for prefix in listed["common_prefixes"])

    async def _ask(self, path: str, request: Awaitable[T], *, within: float | None = _SMALL_S) -> T:
        """`within` None: as long as bytes flow; the client ends a silence, the caller the whole."""
        from obstore.exceptions import BaseError

        try:
            async with asyncio.timeout(within):
                return await request
        except TimeoutError:
            raise Trouble(f"{self._where(path)}: no answer in time") from None
        except (BaseError, OSError) as error:
            raise self._ours(error, path) from None

    def _where(self, path: str) -> str:
        return f"{self.url}/{path}" if path else self.url

    def _ours(self, error: Exception, path: str) -> ModelError:
        """What the library's error means. Listing knows no kinds of errors, so the store's own words count too."""
        from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

        where, text = self._where(path), str(error)
        code, status = _CODE.search(text), _status(error)
        if code is not None and code[1] in _NO_BUCKET:
            return ModelError(f"store.url: {self.url}: there is no such bucket")
        if isinstance(error, FileNotFoundError):
            return Missing(f"{where} is not there")
        if isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in ("401", "403"):
            return Forbidden(f"{where}: the store refused our credentials ({explain(error)})")
        if status == "416" or _NO_SUCH_BYTES in text:
            return _NoSuchBytes(f"{where}: it ends before")
        return (Trouble if _may_pass(status) else ModelError)(f"{where}: {explain(error)}")


class _NoSuchBytes(ModelError):
    """An object ends before what was asked of it."""


def _part_bytes(content: bytes | Path) -> int:
    """S3 takes 10,000 parts of an object."""
    size = content.stat().st_size if isinstance(content, Path) else len(content)
    return max(_PART, size // _MOST_PARTS + 1)


def explain(error: Exception) -> str:
    """The library's paragraph in a few words: the HTTP status and the store's own code where there are such."""
    text = str(error)
    if status := _STATUS.search(text):
        code = _CODE.search(text)
        return f"{status[1]} {code[1] if code else status[2] or ''}".replace("  ", " ").strip()
    return text.partition("\n")[0][:200] or type(error).__name__


def _status(error: Exception) -> str | None:
    """HTTP's, where the store answered."""
    found = _STATUS.search(str(error))
    return None if found is None else found[1]


def _may_pass(status: str | None) -> bool:
    """Server errors, throttling, a lost connection may; another answer will be the same the next time."""
    return status is None or status in ("408", "429") or status.startswith("5")
