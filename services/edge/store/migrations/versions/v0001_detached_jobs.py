"""Detached jobs and their tokens."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "detached_jobs",
        sa.Column("job", sa.String(32), nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("request", sa.LargeBinary, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("ended", sa.Double),
        sa.Column("edge", sa.String(64), nullable=False),
        sa.Column("lease_until", sa.Double, nullable=False),
        sa.Column("cancel", sa.Boolean, nullable=False),
        sa.Column("attempt", sa.BigInteger, nullable=False),
        sa.Column("claimed", sa.BigInteger, nullable=False),
        sa.Column("deaths", sa.Integer, nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("owned", sa.Boolean, nullable=False),
        sa.Column("weights", sa.String(128), nullable=False),
        sa.Column("cached_tokens", sa.Integer),
        sa.Column("error_code", sa.String(64), nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("job", name="pk_detached_jobs"),
    )
    op.create_index("ix_detached_jobs_state_lease_until", "detached_jobs", ["state", "lease_until"])
    op.create_table(
        "detached_tokens",
        sa.Column("job", sa.String(32), nullable=False),
        sa.Column("choice", sa.Integer, nullable=False),
        sa.Column("first", sa.Integer, nullable=False),
        sa.Column("count", sa.Integer, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("job", "choice", "first", name="pk_detached_tokens"),
    )


def downgrade() -> None:
    op.drop_table("detached_tokens")
    op.drop_table("detached_jobs")
