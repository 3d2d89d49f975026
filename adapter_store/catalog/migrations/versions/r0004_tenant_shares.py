"""Adds who registered each layout, and how long each image took to build."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    registrant = sa.Column("registered_by", sa.Text(), nullable=False, server_default="")
    op.add_column("layouts", registrant)
    duration = sa.Column("build_micros", BIG, nullable=False, server_default="0")
    op.add_column("images", duration)
