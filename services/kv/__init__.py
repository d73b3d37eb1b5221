"""KV blocks: who holds which, what a full block is called, how blocks move. Knows no NATS, engine or torch."""
