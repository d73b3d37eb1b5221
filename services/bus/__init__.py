"""The bus: the one place that knows nats-py and its traps. Import from its modules."""
