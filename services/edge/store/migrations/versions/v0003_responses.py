"""Responses and conversations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "responses",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("running", sa.Boolean, nullable=False),
        sa.Column("previous", sa.String(64)),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("object", sa.LargeBinary, nullable=False),
        sa.Column("input", sa.LargeBinary, nullable=False),
        sa.Column("output", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_responses"),
    )
    op.create_index("ix_responses_running", "responses", ["running"])
    op.create_index("ix_responses_created", "responses", ["created"])
    op.create_table(
        "conversations",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("metadata", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_conversations"),
    )
    op.create_table(
        "conversation_items",
        sa.Column("conversation", sa.String(64), nullable=False),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column("id", sa.String(160), nullable=False),
        sa.Column("item", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("conversation", "position", name="pk_conversation_items"),
    )


def downgrade() -> None:
    op.drop_table("conversation_items")
    op.drop_table("conversations")
    op.drop_table("responses")
