"""Tables of earlier releases are taken along, those of newer ones refused."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import select

from adapter_store.catalog import migrations
from adapter_store.catalog.catalog import Catalog
from adapter_store.catalog.tables import schema
from adapter_store.core import Announcement, EventKind, SignatureState
from adapter_store.errors import CorruptData
from contract.images.segment_kinds import SegmentKind
from servicekit.refs import AdapterName, AdapterRef
from tests.support.store.catalogs import BASE, Names, connected

FIRST_RELEASE = Path(__file__).with_name("first_release.sql")


def open_catalog(path: Path) -> Catalog:
    return Catalog(path, event_retention=1000)


def test_catalog_of_the_first_release_is_migrated(tmp_path):
    path = tmp_path / "catalog.sqlite3"
    with sqlite3.connect(path) as connection:
        connection.executescript(FIRST_RELEASE.read_text())
    connection.close()
    catalog = open_catalog(path)
    record, revision = catalog.names.get(AdapterRef(AdapterName("acme", "support")))
    assert (record.version, record.digest, revision) == (2, "sha256:" + "b" * 64, 3)
    assert (record.labels, record.rank, record.pinned) == ({"team": "cx"}, 8, True)
    assert (record.files, record.description, record.created_by) == ((), "", "")
    assert record.signature_state is SignatureState.UNSIGNED
    assert _layout_age_seconds(path) < 3600
    known = catalog.names.known_base_models(record.name)
    assert known.served == {"org/tiny": {"org/tiny", "tiny"}}
    kinds = [event.kind for event in catalog.history.since(0, 10)]
    assert kinds == [EventKind.REGISTERED, EventKind.UPDATED, EventKind.PINNED]
    assert catalog.names.rollback(record.name, 1)[1] == 4
    catalog.close()
    catalog = open_catalog(path)
    assert catalog.history.revision() == 4
    catalog.close()


def _layout_age_seconds(place: Path) -> float:
    with connected(place) as conn:
        last_use = conn.execute(select(schema.layouts.c.last_use_time)).scalar_one()
    return time.time() - last_use / 1e6


def test_the_first_release_refuses_what_it_does_not_know(catalog, place):
    with connected(place) as conn:
        found = conn.exec_driver_sql("SELECT value FROM meta WHERE key = 'schema_version'")
        assert found.scalar() == "2"


def test_a_newer_catalog_is_refused_by_its_schema(tmp_path):
    path = tmp_path / "catalog.sqlite3"
    open_catalog(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0099'")
    connection.close()
    with pytest.raises(CorruptData, match="schema 0099") as caught:
        open_catalog(path)
    assert caught.value.subject == "schema_version"


def test_tables_of_another_program_are_refused(tmp_path):
    path = tmp_path / "catalog.sqlite3"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE meta (key TEXT, value TEXT)")
    connection.close()
    with pytest.raises(CorruptData, match="schema None"):
        open_catalog(path)


def test_a_migration_that_fails_leaves_the_old_tables(tmp_path, monkeypatch):
    path = tmp_path / "catalog.sqlite3"
    with sqlite3.connect(path) as connection:
        connection.executescript(FIRST_RELEASE.read_text())
        connection.execute("CREATE TABLE leases (unexpected TEXT)")
    connection.close()
    with pytest.raises(Exception, match="leases"):
        open_catalog(path)
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE leases")
    connection.close()
    catalog = open_catalog(path)
    assert catalog.history.revision() == 3
    catalog.close()


def test_migrations_make_the_tables_of_the_schema(catalog, place):
    with connected(place) as conn:
        context = MigrationContext.configure(conn, opts={"compare_type": True})
        found = compare_metadata(context, schema.metadata)
    assert found == []


def test_announcements_of_earlier_servers_are_marked(tmp_path):
    path = tmp_path / "catalog.sqlite3"
    with sqlite3.connect(path) as connection:
        connection.executescript(FIRST_RELEASE.read_text())
    connection.close()
    catalog = open_catalog(path)
    (layout_id,) = catalog.layouts.ids()
    catalog.close()
    with sqlite3.connect(path) as connection:
        for column in ("is_renewed", "announced_by", *NEW_COLUMNS["announcements"]):
            connection.execute(f"ALTER TABLE announcements DROP COLUMN {column}")
        for table in ("blobs", "images"):
            for column in NEW_COLUMNS[table]:
                connection.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        for statement in (*WITHOUT_LABELS, *WITHOUT_LIFETIMES, *WITHOUT_TEXTS):
            connection.execute(statement)
        connection.execute("UPDATE alembic_version SET version_num = '0006'")
        insert = "INSERT INTO announcements VALUES (?, ?, '[]', 0, ?)"
        connection.execute(insert, ("earlier", layout_id, 1 << 62))
        connection.execute(insert, ("now", layout_id, int((time.time() + 3600) * 1e6)))
    connection.close()
    catalog = open_catalog(path)
    with connected(path) as conn:
        rows = conn.execute(select(schema.announcements)).all()
    assert {row.announcement_id: row.is_renewed for row in rows} == {"earlier": False, "now": True}
    catalog.close()


NEW_COLUMNS = {
    "announcements": (
        *("segment_kinds", "lora_targets", "max_added_tokens", "applies_invocation_tokens"),
        *("base_model", "weight_form", "num_ranks", "rank_index", "first_announcement_id"),
    ),
    "images": ("content", "retry_micros"),
    "blobs": ("segment_kinds", "invocation_tokens"),
}
"""Those of migrations 0008, 0009, 0012, 0013 and 0014."""
_TEXT_COLUMNS = ("tokenizer_digest", "chat_template_digest")
WITHOUT_TEXTS = (
    "DROP TABLE texts",
    *(f"DROP INDEX versions_by_{column}" for column in _TEXT_COLUMNS),
    *(f"ALTER TABLE versions DROP COLUMN {column}" for column in _TEXT_COLUMNS),
)
"""Takes back migration 0010."""
WITHOUT_LIFETIMES = (
    "DROP INDEX versions_expiring",
    *(f"ALTER TABLE versions DROP COLUMN {column}" for column in ("ephemeral", "expire_time")),
)
"""Takes back migration 0011."""
WITHOUT_LABELS = ("ALTER TABLE versions DROP COLUMN class_labels",)
"""Takes back migration 0015."""


def test_adapters_and_servers_of_the_release_before_have_and_apply_a_and_b(place, clock):
    """What that release has recorded is taken along, in both databases."""
    catalog = Catalog(place, event_retention=1000, clock=clock)
    catalog.layouts.add("L", BASE, "{}")
    catalog.servers.announce("L", "A", Announcement(max_rank=16))
    Names(catalog).register("a", "d1")
    with connected(place) as conn:
        for table, columns in NEW_COLUMNS.items():
            for column in columns:
                conn.exec_driver_sql(f"ALTER TABLE {table} DROP COLUMN {column}")
        for statement in (*WITHOUT_LABELS, *WITHOUT_LIFETIMES, *WITHOUT_TEXTS):
            conn.exec_driver_sql(statement)
        conn.exec_driver_sql("UPDATE alembic_version SET version_num = '0007'")
    catalog.close()
    catalog = Catalog(place, event_retention=1000, clock=clock)
    names = Names(catalog)
    names.register("b", "d2", targets=("q_proj",), segment_kinds=(SegmentKind.MAGNITUDE,))
    record = names.get("a")
    assert (record.segment_kinds, record.added_tokens, record.invocation_tokens) == ((), 0, ())
    assert (record.tokenizer_digest, record.chat_template_digest) == ("", "")
    assert (record.ephemeral, record.expire_time, record.class_labels) == (False, None, ())
    assert names.register("a", "d1")[0].version == 1
    (server,) = record.verdicts[0].servers
    assert (server.announcement_id, server.max_rank, server.lora_targets) == ("A", 16, ())
    assert server.refusal(record, record.verdicts[0]) == ""
    other = names.get("b")
    assert "DoRA magnitudes" in server.refusal(other, other.verdicts[0])
    catalog.close()


def test_head_is_the_newest_migration():
    folder = Path(migrations.__file__).parent
    assert ScriptDirectory(str(folder)).get_current_head() == migrations.HEAD
