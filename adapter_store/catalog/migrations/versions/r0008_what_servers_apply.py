"""Adds the contents of adapters beside A and B, the changes of their images, and the contents that
servers announce to apply."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.add_column("blobs", _json_list("segment_kinds"))
    op.add_column("blobs", _json_list("invocation_tokens"))
    op.add_column("images", sa.Column("content", sa.Text()))
    for name in ("segment_kinds", "lora_targets"):
        op.add_column("announcements", _json_list(name))
    op.add_column("announcements", _number("max_added_tokens"))
    applies: sa.Column[bool] = sa.Column(
        "applies_invocation_tokens", sa.Boolean(), nullable=False, server_default=sa.false()
    )
    op.add_column("announcements", applies)


def _json_list(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=False, server_default="[]")


def _number(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.Integer(), nullable=False, server_default="0")
