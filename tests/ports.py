"""Ports for servers that a test starts: chosen as `headrace up` chooses them."""

from services.cli.up.ports import free_port, free_ports

__all__ = ["free_port", "free_ports"]
