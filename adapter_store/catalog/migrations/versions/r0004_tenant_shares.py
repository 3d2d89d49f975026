"""Adds who registered each layout, and when each image was built and how long that took."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    registrant = sa.Column("registered_by", sa.Text(), nullable=False, server_default="")
    op.add_column("layouts", registrant)
    for name in ("build_time", "build_micros"):
        op.add_column("images", sa.Column(name, BIG, nullable=False, server_default="0"))
