"""Adds the announcements of servers beside their layouts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
PLAIN = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "announcements",
        sa.Column("announcement_id", PLAIN, primary_key=True),
        sa.Column("layout_id", PLAIN, sa.ForeignKey("layouts.layout_id"), nullable=False),
        sa.Column("aliases", sa.Text(), nullable=False),
        sa.Column("max_rank", BIG, nullable=False),
        sa.Column("expire_time", BIG, nullable=False),
    )
    op.create_index("announcements_by_layout", "announcements", ["layout_id"])
