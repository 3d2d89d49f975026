"""Adds which of several processes of a server a layout is of, each of which has a part of the
model."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    for name in ("num_ranks", "rank_index"):
        number: sa.Column[int] = sa.Column(name, sa.Integer(), nullable=False, server_default="0")
        op.add_column("announcements", number)
    first: sa.Column[str] = sa.Column(
        "first_announcement_id", sa.Text(), nullable=False, server_default=""
    )
    op.add_column("announcements", first)
