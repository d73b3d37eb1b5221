"""What the model store tells the person who starts Headrace. Never sent to a caller, so it may name paths."""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be used. The text is one line that says what to do."""


class GGUFError(ModelError):
    """A file is not GGUF as we read it: broken, cut short, or of a kind we do not support."""
