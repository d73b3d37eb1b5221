"""The usage ledger, budgets and what edges hold of them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "usage",
        sa.Column("job", sa.String(32), nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("key", sa.String(32), nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("compute_s", sa.Double, nullable=False),
        sa.Column("cost", sa.Double),
        sa.Column("booked", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("job", name="pk_usage"),
    )
    op.create_index("ix_usage_tenant_booked", "usage", ["tenant", "booked"])
    op.create_table(
        "budgets",
        sa.Column("owner", sa.String(160), nullable=False),
        sa.Column("window", sa.String(32), nullable=False),
        sa.Column("spent", sa.BigInteger, nullable=False),
        sa.Column("taken", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("owner", "window", name="pk_budgets"),
    )
    op.create_table(
        "allotments",
        sa.Column("owner", sa.String(160), nullable=False),
        sa.Column("window", sa.String(32), nullable=False),
        sa.Column("edge", sa.String(64), nullable=False),
        sa.Column("amount", sa.BigInteger, nullable=False),
        sa.Column("lease_until", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("owner", "window", "edge", name="pk_allotments"),
    )


def downgrade() -> None:
    op.drop_table("allotments")
    op.drop_table("budgets")
    op.drop_table("usage")
