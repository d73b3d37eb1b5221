"""The decode phase: KV blocks in, tokens out."""
