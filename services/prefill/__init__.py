"""The prefill phase: prompt in, KV blocks and first token out, handed to a decode worker."""
