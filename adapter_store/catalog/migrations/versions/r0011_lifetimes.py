"""Adds versions that live in memory, and versions that are deleted by themselves."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from adapter_store.catalog.tables.schema import Big

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    ephemeral: sa.Column[bool] = sa.Column(
        "ephemeral", sa.Boolean(), nullable=False, server_default=sa.false()
    )
    op.add_column("versions", ephemeral)
    op.add_column("versions", sa.Column("expire_time", Big))
    expires = sa.text("expire_time IS NOT NULL")
    op.create_index(
        "versions_expiring",
        "versions",
        ["expire_time"],
        sqlite_where=expires,
        postgresql_where=expires,
    )
