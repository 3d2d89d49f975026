"""Adds the accounts of announcements, and which announcements are renewed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

_FOR_EVER = 1 << 62


def upgrade() -> None:
    op.add_column(
        "announcements",
        sa.Column("is_renewed", sa.Boolean(), nullable=False, server_default=sa.true()),
    )
    op.add_column(
        "announcements", sa.Column("announced_by", sa.Text(), nullable=False, server_default="")
    )
    mark = sa.text("UPDATE announcements SET is_renewed = :no WHERE expire_time >= :for_ever")
    op.get_bind().execute(mark, {"no": False, "for_ever": _FOR_EVER})
