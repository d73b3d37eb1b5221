"""Run by Alembic inside `migrate`, on the connection and in the transaction that it opened."""

from __future__ import annotations

from alembic import context

from services.edge.store.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
