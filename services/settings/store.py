"""Where models are fetched from."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import Field, field_validator

from services.settings.section import Seconds, Section

STORE_SCHEMES = ("s3", "gs", "az", "abfs", "abfss", "file")


class StoreSettings(Section):
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
