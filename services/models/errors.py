"""What the model store tells the person who starts Headrace. Never sent to a caller, so it may name paths."""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be used. The text is one line that says what to do."""


class GGUFError(ModelError):
    """A file is not GGUF as we read it: broken, cut short, or of a kind we do not support."""


class Missing(ModelError):
    """An object is not in the store."""


class Forbidden(ModelError):
    """The store does not let us: credentials are missing, wrong or too weak."""


class Trouble(ModelError):
    """The store did not answer, or not as it should. It may next time."""
