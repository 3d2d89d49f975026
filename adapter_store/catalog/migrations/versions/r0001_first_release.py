"""The tables of the first release."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
PLAIN = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "meta", sa.Column("key", sa.Text(), primary_key=True), sa.Column("value", sa.Text())
    )
    op.create_table(
        "blobs",
        sa.Column("digest", PLAIN, primary_key=True),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("targets", sa.Text(), nullable=False),
        sa.Column("source_bytes", BIG, nullable=False),
        sa.Column("create_time", BIG, nullable=False),
    )
    _create_names()
    _create_images()
    op.create_table(
        "events",
        sa.Column("revision", BIG, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("time", BIG, nullable=False),
    )


def _create_names() -> None:
    op.create_table(
        "adapters",
        sa.Column("id", BIG, primary_key=True),
        sa.Column("tenant", PLAIN, nullable=False),
        sa.Column("name", PLAIN, nullable=False),
        sa.Column("current_version", sa.Integer(), nullable=False),
        sa.Column("last_version", sa.Integer(), nullable=False),
        sa.Column("revision", BIG, nullable=False),
        sa.Column("update_time", BIG, nullable=False),
        sa.UniqueConstraint("tenant", "name", name="adapters_by_name"),
    )
    op.create_table(
        "versions",
        sa.Column("adapter_id", BIG, sa.ForeignKey("adapters.id"), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("digest", PLAIN, sa.ForeignKey("blobs.digest"), nullable=False),
        sa.Column("base_model", PLAIN, nullable=False),
        sa.Column("source_uri", sa.Text(), nullable=False),
        sa.Column("labels", sa.Text(), nullable=False),
        sa.Column("pinned", sa.Boolean(), nullable=False),
        sa.Column("create_time", BIG, nullable=False),
        sa.Column("delete_time", BIG),
        sa.PrimaryKeyConstraint("adapter_id", "version"),
    )
    op.create_index("versions_by_digest", "versions", ["digest"])
    op.create_index("versions_by_base_model", "versions", ["base_model", "digest"])
    _create_partial_index("versions_deleted", "versions", "delete_time", "delete_time IS NOT NULL")
    _create_partial_index("versions_pinned", "versions", "digest", "pinned IS TRUE")
    _create_partial_index("adapters_live", "adapters", "id", "current_version > 0")


def _create_partial_index(name: str, table: str, column: str, where: str) -> None:
    condition = sa.text(where)
    op.create_index(name, table, [column], sqlite_where=condition, postgresql_where=condition)


def _create_images() -> None:
    op.create_table(
        "layouts",
        sa.Column("layout_id", PLAIN, primary_key=True),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("create_time", BIG, nullable=False),
    )
    op.create_table(
        "layout_bases",
        sa.Column("base_model", PLAIN, nullable=False),
        sa.Column("layout_id", PLAIN, sa.ForeignKey("layouts.layout_id"), nullable=False),
        sa.PrimaryKeyConstraint("base_model", "layout_id"),
    )
    op.create_table(
        "images",
        sa.Column("digest", PLAIN, sa.ForeignKey("blobs.digest"), nullable=False),
        sa.Column("layout_id", PLAIN, sa.ForeignKey("layouts.layout_id"), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("image_bytes", BIG, nullable=False),
        sa.PrimaryKeyConstraint("digest", "layout_id"),
    )
