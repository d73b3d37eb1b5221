"""What NATS accounts may do; the ledger by time, so that old rows are found."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "nats_accounts",
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("tier", sa.String(16), nullable=False),
        sa.Column("models", sa.Text),
        sa.Column("limits", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_nats_accounts"),
    )
    op.create_index("ix_usage_booked", "usage", ["booked"])


def downgrade() -> None:
    op.drop_index("ix_usage_booked", "usage")
    op.drop_table("nats_accounts")
