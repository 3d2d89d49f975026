"""Adds the tokenizers and chat templates that versions bring along."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from adapter_store.catalog.tables.schema import Plain

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_table(
        "texts",
        sa.Column("digest", Plain, primary_key=True),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.Column("size_bytes", sa.Integer(), nullable=False),
    )
    for name in ("tokenizer_digest", "chat_template_digest"):
        column: sa.Column[str] = sa.Column(name, Plain, nullable=False, server_default="")
        op.add_column("versions", column)
        has_text = sa.text(f"{name} != ''")
        op.create_index(
            f"versions_by_{name}",
            "versions",
            [name],
            sqlite_where=has_text,
            postgresql_where=has_text,
        )
