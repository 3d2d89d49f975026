"""The tables of the catalog, in types that SQLite and PostgreSQL share.

Times are microseconds since the epoch, UTC. A name is never deleted, so that a version number is
never used again for other content. Migrations create these tables: a change here needs one.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    false,
    true,
)

metadata = MetaData()

Big = BigInteger().with_variant(Integer(), "sqlite")

Plain = Text().with_variant(Text(collation="C"), "postgresql")
"""Text in the order of its bytes, independent of the collation of the database."""

meta = Table("meta", metadata, Column("key", Text, primary_key=True), Column("value", Text))

# One row, which every writer locks: so revisions have no gaps and are committed in order.
history = Table(
    "history",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("revision", Big, nullable=False),
)

# The content of a digest, for all names that point to it.
blobs = Table(
    "blobs",
    metadata,
    Column("digest", Plain, primary_key=True),
    Column("rank", Integer, nullable=False),
    Column("targets", Text, nullable=False),  # JSON list of module names
    Column("source_bytes", Big, nullable=False),
    Column("create_time", Big, nullable=False),
    # Where it is stored, if it is shared; MEMORY: nowhere else.
    Column("place", Text, nullable=False, server_default=""),
    Column("files", Text, nullable=False, server_default="[]"),  # JSON: the files stored there
    # JSON list of its contents beside A and B.
    Column("segment_kinds", Text, nullable=False, server_default="[]"),
    Column("invocation_tokens", Text, nullable=False, server_default="[]"),  # JSON list
)

# Extracts of tokenizers, and chat templates, for all versions that have them: some kilobytes each.
texts = Table(
    "texts",
    metadata,
    Column("digest", Plain, primary_key=True),
    Column("content", LargeBinary, nullable=False),
    Column("size_bytes", Integer, nullable=False),
)

adapters = Table(
    "adapters",
    metadata,
    Column("id", Big, primary_key=True),
    Column("tenant", Plain, nullable=False),
    Column("name", Plain, nullable=False),
    Column("current_version", Integer, nullable=False),  # 0: the name is gone
    Column("last_version", Integer, nullable=False),
    Column("revision", Big, nullable=False),  # of the name's last change
    Column("update_time", Big, nullable=False),
    UniqueConstraint("tenant", "name", name="adapters_by_name"),
)

versions = Table(
    "versions",
    metadata,
    Column("adapter_id", Big, ForeignKey("adapters.id"), nullable=False),
    Column("version", Integer, nullable=False),
    Column("digest", Plain, ForeignKey("blobs.digest"), nullable=False),
    Column("base_model", Plain, nullable=False),
    Column("source_uri", Text, nullable=False),
    Column("labels", Text, nullable=False),  # JSON object
    Column("pinned", Boolean, nullable=False),
    Column("create_time", Big, nullable=False),
    Column("delete_time", Big),  # when it was deleted; kept for the grace
    Column("description", Text, nullable=False, server_default=""),
    Column("created_by", Text, nullable=False, server_default=""),
    Column("source_revision", Text, nullable=False, server_default=""),
    Column("config_base_model", Text, nullable=False, server_default=""),
    Column("files", Text, nullable=False, server_default="[]"),  # JSON: the fetched files
    Column("signed_by", Text, nullable=False, server_default=""),
    Column("signature", LargeBinary),
    # Digests of `texts`; "": it has none.
    Column("tokenizer_digest", Plain, nullable=False, server_default=""),
    Column("chat_template_digest", Plain, nullable=False, server_default=""),
    Column("class_labels", Text, nullable=False, server_default="[]"),  # JSON list
    # Its content is in the store's memory alone, unless replicas share it.
    Column("ephemeral", Boolean, nullable=False, server_default=false()),
    Column("expire_time", Big),  # when it is deleted by itself; NULL: never
    PrimaryKeyConstraint("adapter_id", "version"),
    Index("versions_by_digest", "digest"),
    Index("versions_by_base_model", "base_model", "digest"),
)
_DELETED = versions.c.delete_time.is_not(None)
Index(
    "versions_deleted",
    versions.c.delete_time,
    sqlite_where=_DELETED,
    postgresql_where=_DELETED,
)
_EXPIRES = versions.c.expire_time.is_not(None)
Index(
    "versions_expiring",
    versions.c.expire_time,
    sqlite_where=_EXPIRES,
    postgresql_where=_EXPIRES,
)
for _column in (versions.c.tokenizer_digest, versions.c.chat_template_digest):
    _HAS_TEXT = _column != ""
    Index(
        f"versions_by_{_column.name}", _column, sqlite_where=_HAS_TEXT, postgresql_where=_HAS_TEXT
    )
_PINNED = versions.c.pinned.is_(True)
Index("versions_pinned", versions.c.digest, sqlite_where=_PINNED, postgresql_where=_PINNED)
_LIVE = adapters.c.current_version > 0
Index("adapters_live", adapters.c.id, sqlite_where=_LIVE, postgresql_where=_LIVE)

layouts = Table(
    "layouts",
    metadata,
    Column("layout_id", Plain, primary_key=True),
    Column("body", Text, nullable=False),  # JSON
    Column("create_time", Big, nullable=False),
    Column("last_use_time", Big, nullable=False, server_default="0"),  # about; see layouts.use
    Column("registered_by", Text, nullable=False, server_default=""),  # an account
)

# One row for the layout's base model, as the first server called it, and for each other name that a
# server has announced: an alias, or another model of the same shapes.
layout_bases = Table(
    "layout_bases",
    metadata,
    Column("base_model", Plain, nullable=False),
    Column("layout_id", Plain, ForeignKey("layouts.layout_id"), nullable=False),
    Column("is_alias", Boolean, nullable=False, server_default=false()),
    PrimaryKeyConstraint("base_model", "layout_id"),
)

# Announcements of servers beside a layout, until they expire.
announcements = Table(
    "announcements",
    metadata,
    Column("announcement_id", Plain, primary_key=True),
    Column("layout_id", Plain, ForeignKey("layouts.layout_id"), nullable=False),
    Column("aliases", Text, nullable=False),  # JSON list
    Column("max_rank", Big, nullable=False),  # 0: any
    Column("expire_time", Big, nullable=False),
    # False: of a server of an earlier release, which lasts as long as its layout is in use.
    Column("is_renewed", Boolean, nullable=False, server_default=true()),
    Column("announced_by", Text, nullable=False, server_default=""),  # an account
    # JSON lists: the contents beside A and B that it applies, and the targets that it is restricted
    # to.
    Column("segment_kinds", Text, nullable=False, server_default="[]"),
    Column("lora_targets", Text, nullable=False, server_default="[]"),
    Column("max_added_tokens", Integer, nullable=False, server_default="0"),
    Column("applies_invocation_tokens", Boolean, nullable=False, server_default=false()),
    Column("base_model", Text, nullable=False, server_default=""),  # "": the layout's
    Column("weight_form", Text, nullable=False, server_default=""),  # "": plain
    Column("num_ranks", Integer, nullable=False, server_default="0"),  # 0: one has all
    Column("rank_index", Integer, nullable=False, server_default="0"),
    Column("first_announcement_id", Text, nullable=False, server_default=""),
    Index("announcements_by_layout", "layout_id"),
)

# Verdicts so far. No row: PENDING, and not known whether the adapter fits.
images = Table(
    "images",
    metadata,
    Column("digest", Plain, ForeignKey("blobs.digest"), nullable=False),
    Column("layout_id", Plain, ForeignKey("layouts.layout_id"), nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("image_bytes", Big, nullable=False),
    Column("build_time", Big, nullable=False, server_default="0"),  # when its build began
    Column("build_micros", Big, nullable=False, server_default="0"),  # and how long it took
    # How long after a failed build it is tried again; 0: the verdict is final.
    Column("retry_micros", Big, nullable=False, server_default="0"),
    Column("content", Text),  # JSON: its changes; NULL: not planned yet, or by a release before
    PrimaryKeyConstraint("digest", "layout_id"),
)

events = Table(
    "events",
    metadata,
    Column("revision", Big, primary_key=True, autoincrement=False),
    Column("kind", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("digest", Text, nullable=False),
    Column("time", Big, nullable=False),
)

# The owner of work that only one replica may do at a time, and when the lease expires.
leases = Table(
    "leases",
    metadata,
    Column("key", Plain, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("expire_time", Big, nullable=False),
)
