"""Adds how servers call their base model: servers of one layout may have different names."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    name: sa.Column[str] = sa.Column("base_model", sa.Text(), nullable=False, server_default="")
    op.add_column("announcements", name)
