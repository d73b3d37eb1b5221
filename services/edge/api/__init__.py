"""OpenAI's HTTP API over `jobs`: requests in, text out. Knows HTTP and text, not the bus."""
