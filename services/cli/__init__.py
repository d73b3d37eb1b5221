"""The `headrace` command: starts services, and talks to them as a user would. The only layer that knows all others."""
