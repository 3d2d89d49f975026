"""Tables of the catalog, and how SQLite is opened for them.

Durable (`synchronous=FULL`) with readers beside one writer (WAL). Times are microseconds since the
epoch, UTC. A name is never forgotten, so that a version number never comes back with other content.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Engine,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    create_engine,
    event,
)

SCHEMA_VERSION = "1"
BUSY_TIMEOUT_MS = 30_000

metadata = MetaData()

meta = Table("meta", metadata, Column("key", Text, primary_key=True), Column("value", Text))

# What a digest's content is, whoever registered it.
blobs = Table(
    "blobs",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("rank", Integer, nullable=False),
    Column("targets", Text, nullable=False),  # JSON list of module names
    Column("source_bytes", Integer, nullable=False),
    Column("create_time", Integer, nullable=False),
)

adapters = Table(
    "adapters",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("current_version", Integer, nullable=False),  # 0: the name is gone
    Column("last_version", Integer, nullable=False),
    Column("revision", Integer, nullable=False),  # of the name's last change
    Column("update_time", Integer, nullable=False),
    UniqueConstraint("tenant", "name"),
)

versions = Table(
    "versions",
    metadata,
    Column("adapter_id", ForeignKey("adapters.id"), nullable=False),
    Column("version", Integer, nullable=False),
    Column("digest", ForeignKey("blobs.digest"), nullable=False),
    Column("base_model", Text, nullable=False),
    Column("source_uri", Text, nullable=False),
    Column("labels", Text, nullable=False),  # JSON object
    Column("pinned", Boolean, nullable=False),
    Column("create_time", Integer, nullable=False),
    Column("delete_time", Integer),  # no longer resolved since; kept through the grace
    PrimaryKeyConstraint("adapter_id", "version"),
    Index("versions_by_digest", "digest"),
    Index("versions_by_base_model", "base_model", "digest"),
)
Index(
    "versions_deleted",
    versions.c.delete_time,
    sqlite_where=versions.c.delete_time.is_not(None),
)
Index("versions_pinned", versions.c.digest, sqlite_where=versions.c.pinned.is_(True))
Index("adapters_live", adapters.c.id, sqlite_where=adapters.c.current_version > 0)

layouts = Table(
    "layouts",
    metadata,
    Column("layout_id", Text, primary_key=True),
    Column("body", Text, nullable=False),  # JSON
    Column("create_time", Integer, nullable=False),
)

# One row for the layout's base model and for each of its aliases.
layout_bases = Table(
    "layout_bases",
    metadata,
    Column("base_model", Text, nullable=False),
    Column("layout_id", ForeignKey("layouts.layout_id"), nullable=False),
    PrimaryKeyConstraint("base_model", "layout_id"),
)

# Verdicts so far. No row: PENDING.
images = Table(
    "images",
    metadata,
    Column("digest", ForeignKey("blobs.digest"), nullable=False),
    Column("layout_id", ForeignKey("layouts.layout_id"), nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("image_bytes", Integer, nullable=False),
    PrimaryKeyConstraint("digest", "layout_id"),
)

events = Table(
    "events",
    metadata,
    Column("revision", Integer, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("digest", Text, nullable=False),
    Column("time", Integer, nullable=False),
)


def open_engine(path: Path) -> Engine:
    """Opens the database file. Transactions begin as the `immediate` execution option says."""
    engine = create_engine(
        f"sqlite:///{path}", connect_args={"timeout": BUSY_TIMEOUT_MS / 1000}, pool_size=16
    )

    @event.listens_for(engine, "connect")
    def _configure(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # the begin event below says which BEGIN
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        immediate = connection.get_execution_options().get("immediate", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine
