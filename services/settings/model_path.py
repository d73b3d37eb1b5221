"""Where a model lies, from how it is called."""

from __future__ import annotations

import os
from pathlib import Path


def is_folder(model: str) -> bool:
    """Whether a model is given as a path, and not by its name."""
    return os.sep in model or model.startswith((".", "~"))


def model_path(home: Path, model: str) -> Path:
    """Where a model lies or will lie: a name is looked up under `home`, anything with a slash is a folder."""
    return Path(model).expanduser() if is_folder(model) else home / "models" / model
