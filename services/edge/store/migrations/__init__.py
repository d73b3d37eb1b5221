"""Alembic's environment. Edges run it by themselves (`services.edge.store.migrate`); nothing here is run by hand."""
