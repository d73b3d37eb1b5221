"""Which model answers a request."""
