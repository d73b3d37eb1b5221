"""What is raised for settings that are wrong."""

from __future__ import annotations


class SettingsError(Exception):
    """Names each key that is wrong, and why."""
