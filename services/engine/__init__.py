"""Engines: what turns token ids into KV blocks and KV blocks into token ids."""
