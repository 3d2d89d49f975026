"""Adds the form in which servers hold the base model's weights."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    weight_form: sa.Column[str] = sa.Column(
        "weight_form", sa.Text(), nullable=False, server_default=""
    )
    op.add_column("announcements", weight_form)
