"""Adds where versions came from, their signatures, and tables that several replicas share."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
PLAIN = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


_NEW_TEXTS = ("description", "created_by", "source_revision", "config_base_model", "signed_by")


def upgrade() -> None:
    for name in _NEW_TEXTS:
        op.add_column("versions", _text(name))
    op.add_column("versions", _text("files", "[]"))
    op.add_column("versions", sa.Column("signature", sa.LargeBinary()))
    op.add_column("blobs", _text("place"))
    op.add_column("blobs", _text("files", "[]"))
    op.create_table(
        "history",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("revision", BIG, nullable=False),
    )
    op.execute("INSERT INTO history SELECT 1, coalesce(max(revision), 0) FROM events")
    op.create_table(
        "leases",
        sa.Column("key", PLAIN, primary_key=True),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("expire_time", BIG, nullable=False),
    )
    # The first release checks only this, and refuses to start.
    op.execute("DELETE FROM meta WHERE key = 'schema_version'")
    op.execute("INSERT INTO meta (key, value) VALUES ('schema_version', '2')")


def _text(name: str, default: str = "") -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=False, server_default=default)
