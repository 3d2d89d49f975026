"""Adds when each layout was last used; for existing layouts, the time of the migration."""

from __future__ import annotations

import time

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    column = sa.Column("last_use_time", BIG, nullable=False, server_default="0")
    op.add_column("layouts", column)
    now = time.time_ns() // 1000
    op.execute(sa.text("UPDATE layouts SET last_use_time = :now").bindparams(now=now))
