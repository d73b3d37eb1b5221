"""The chat API for callers that speak NATS, each tenant from an account of its own."""
