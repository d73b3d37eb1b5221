"""Who pays for a detached job, and what it has computed: whichever edge ends it books it.

Edges of the version before write rows without these columns.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("detached_jobs", sa.Column("compute_s", sa.Double, nullable=False, server_default="0"))
    op.add_column("detached_jobs", sa.Column("run_compute_s", sa.Double, nullable=False, server_default="0"))
    op.add_column("detached_jobs", sa.Column("bill", sa.LargeBinary))


def downgrade() -> None:
    for column in ("bill", "run_compute_s", "compute_s"):
        op.drop_column("detached_jobs", column)
