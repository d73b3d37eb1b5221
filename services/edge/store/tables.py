"""The tables, as the newest migration leaves them. Portable SQL only: what differs between databases is in `database`.

Times are Unix seconds by the database's own clock, which is the only one that all edges share.
"""

from __future__ import annotations

import sqlalchemy as sa

metadata = sa.MetaData(
    naming_convention={"pk": "pk_%(table_name)s", "ix": "ix_%(table_name)s_%(column_0_N_name)s", "fk": "fk_%(table_name)s"}
)

detached_jobs = sa.Table(
    "detached_jobs",
    metadata,
    sa.Column("job", sa.String(32), primary_key=True),
    sa.Column("tenant", sa.String(128), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("request", sa.LargeBinary, nullable=False),
    sa.Column("created", sa.Double, nullable=False),
    sa.Column("ended", sa.Double),
    # the edge that holds the job, and until when
    sa.Column("edge", sa.String(64), nullable=False),
    sa.Column("lease_until", sa.Double, nullable=False),
    sa.Column("cancel", sa.Boolean, nullable=False),
    # what the next holder must know
    sa.Column("attempt", sa.BigInteger, nullable=False),
    sa.Column("claimed", sa.BigInteger, nullable=False),
    sa.Column("deaths", sa.Integer, nullable=False),
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("owned", sa.Boolean, nullable=False),
    sa.Column("weights", sa.String(128), nullable=False),
    sa.Column("cached_tokens", sa.Integer),
    sa.Column("compute_s", sa.Double, nullable=False, server_default="0"),
    sa.Column("run_compute_s", sa.Double, nullable=False, server_default="0"),
    # how it ended
    sa.Column("error_code", sa.String(64), nullable=False),
    sa.Column("error", sa.Text, nullable=False),
    sa.Column("size", sa.BigInteger, nullable=False),
    # who pays for it
    sa.Column("bill", sa.LargeBinary),
    sa.Index("ix_detached_jobs_state_lease_until", "state", "lease_until"),
)
"""One row a job. `owner` is the worker; `size` is what its tokens take once it has ended, in bytes; `bill`: `gate.records.Bill`
as JSON, NULL = it is not booked."""

detached_tokens = sa.Table(
    "detached_tokens",
    metadata,
    sa.Column("job", sa.String(32), primary_key=True),
    sa.Column("choice", sa.Integer, primary_key=True),
    sa.Column("first", sa.Integer, primary_key=True),
    sa.Column("count", sa.Integer, nullable=False),
    sa.Column("data", sa.LargeBinary, nullable=False),
)
"""What one checkpoint added to one choice: tokens `first`, `first`+1, … (`records.Chunk`)."""

tenants = sa.Table(
    "tenants",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("limits", sa.Text, nullable=False),
    sa.Column("changed", sa.Double, nullable=False),
)
"""One row a tenant that has limits of its own: `gate.limits.Limits` as JSON."""

api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("digest", sa.LargeBinary, nullable=False),
    sa.Column("tenant", sa.String(64), nullable=False),
    sa.Column("name", sa.String(128), nullable=False),
    sa.Column("tier", sa.String(16), nullable=False),
    sa.Column("models", sa.Text),
    sa.Column("limits", sa.Text, nullable=False),
    sa.Column("created", sa.Double, nullable=False),
    sa.Column("expires", sa.Double),
    sa.Column("revoked", sa.Double),
    sa.Column("changed", sa.Double, nullable=False),
    sa.Index("ix_api_keys_changed", "changed"),
    sa.Index("ix_api_keys_tenant", "tenant"),
)
"""One row a key: a keyed digest of it, never its text. `models`: a JSON list, NULL = all; `limits`: as above."""

nats_accounts = sa.Table(
    "nats_accounts",
    metadata,
    sa.Column("name", sa.String(128), primary_key=True),
    sa.Column("tier", sa.String(16), nullable=False),
    sa.Column("models", sa.Text),
    sa.Column("limits", sa.Text, nullable=False),
)
"""One row a NATS account that was told what it may do; `*` = all others. `models`, `limits`: as a key's."""

responses = sa.Table(
    "responses",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("tenant", sa.String(128), nullable=False),
    sa.Column("running", sa.Boolean, nullable=False),
    sa.Column("previous", sa.String(64)),
    sa.Column("created", sa.Double, nullable=False),
    sa.Column("object", sa.LargeBinary, nullable=False),
    sa.Column("input", sa.LargeBinary, nullable=False),
    sa.Column("output", sa.LargeBinary, nullable=False),
    sa.Index("ix_responses_running", "running"),
    sa.Index("ix_responses_created", "created"),
)
"""One row a stored response. `object` (without its output), `input` (its own items, without what came before) and `output` are
JSON; one that is `running` is a detached job's."""

conversations = sa.Table(
    "conversations",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("tenant", sa.String(128), nullable=False),
    sa.Column("created", sa.Double, nullable=False),
    sa.Column("metadata", sa.LargeBinary, nullable=False),
)

conversation_items = sa.Table(
    "conversation_items",
    metadata,
    sa.Column("conversation", sa.String(64), primary_key=True),
    sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("id", sa.String(160), nullable=False),
    sa.Column("item", sa.LargeBinary, nullable=False),
)
"""In order of `position`; `item` is JSON."""

usage = sa.Table(
    "usage",
    metadata,
    sa.Column("job", sa.String(32), primary_key=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("key", sa.String(32), nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False),
    sa.Column("compute_s", sa.Double, nullable=False),
    sa.Column("cost", sa.Double),
    sa.Column("booked", sa.Double, nullable=False),
    sa.Index("ix_usage_tenant_booked", "tenant", "booked"),
    sa.Index("ix_usage_booked", "booked"),
)
"""The ledger of record: a row a request that ended, by its first job's id. `key` "" = none was shown; `cost` NULL = no price."""

budgets = sa.Table(
    "budgets",
    metadata,
    sa.Column("owner", sa.String(160), primary_key=True),
    sa.Column("window", sa.String(32), primary_key=True),
    sa.Column("spent", sa.BigInteger, nullable=False),
    sa.Column("taken", sa.BigInteger, nullable=False),
)
"""One row a key or tenant and window. `spent` is in the ledger; `taken` is that and all allotments."""

allotments = sa.Table(
    "allotments",
    metadata,
    sa.Column("owner", sa.String(160), primary_key=True),
    sa.Column("window", sa.String(32), primary_key=True),
    sa.Column("edge", sa.String(64), primary_key=True),
    sa.Column("amount", sa.BigInteger, nullable=False),
    sa.Column("lease_until", sa.Double, nullable=False),
)
"""What an edge holds of a budget. One whose lease has ended is given back by whoever comes next."""
