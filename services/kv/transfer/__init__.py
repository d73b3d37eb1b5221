"""Moving KV blocks between workers: offer → fetch → release, behind one interface."""
