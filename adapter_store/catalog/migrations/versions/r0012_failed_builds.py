"""Adds when a build that failed is tried again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from adapter_store.catalog.tables.schema import Big

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    retry_micros: sa.Column[int] = sa.Column(
        "retry_micros", Big, nullable=False, server_default="0"
    )
    op.add_column("images", retry_micros)
