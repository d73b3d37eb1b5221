"""Where a model that was pulled lies: `<home>/pulled/<model>/<revision>/`, and beside it what is on its way.

Owns the layout. Invariant: a file that has its name in a revision's folder is whole and never changes, so a process that opened
one revision reads that one, whatever is pulled meanwhile. `current` is a link to the revision pulled last; the one before it is
kept, because a process may be about to load it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from services.models.published import Published, PublishedFile

_CURRENT = "current"
_PARTIAL = "partial"


class Place:
    def __init__(self, home: Path, model: str) -> None:
        self.root = home / "pulled" / model
        self.lock = self.root / ".lock"
        self.current = self.root / _CURRENT

    def folder(self, revision: str) -> Path:
        return self.root / revision

    def partial(self, file: PublishedFile) -> Path:
        """Where `file` grows. Two files of the same content grow each by itself."""
        return self.root / _PARTIAL / f"{file.sha256[:32]}-{file.name}"

    def begun(self, file: PublishedFile) -> int:
        """Bytes of it which are here already."""
        partial = self.partial(file)
        return partial.stat().st_size if partial.is_file() else 0

    def is_current(self, revision: str) -> bool:
        return self.current.is_symlink() and self.current.readlink().name == revision

    def make(self, revision: str) -> None:
        """Raises OSError."""
        self.folder(revision).mkdir(parents=True, exist_ok=True)
        (self.root / _PARTIAL).mkdir(exist_ok=True)

    def publish(self, published: Published) -> None:
        """Make its revision the current one, and drop what neither it nor the one before it needs."""
        revision, on_their_way = published.revision, {self.partial(file) for file in published.files}
        for path in (self.root / _PARTIAL).iterdir():
            if path not in on_their_way:
                path.unlink(missing_ok=True)
        if self.is_current(revision):
            return
        before = self.current.readlink().name if self.current.is_symlink() else revision
        link = self.root / f".{_CURRENT}"
        link.unlink(missing_ok=True)
        link.symlink_to(revision, target_is_directory=True)
        link.replace(self.current)
        for entry in self.root.iterdir():
            if entry.is_dir() and not entry.is_symlink() and entry.name not in (revision, before, _PARTIAL):
                shutil.rmtree(entry, ignore_errors=True)
