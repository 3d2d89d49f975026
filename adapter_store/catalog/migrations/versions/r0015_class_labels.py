"""Adds the names of labels of adapters that classify."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    labels: sa.Column[str] = sa.Column(
        "class_labels", sa.Text(), nullable=False, server_default="[]"
    )
    op.add_column("versions", labels)
