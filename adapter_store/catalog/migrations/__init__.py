"""Brings a database to the tables of `schema`, from nothing or from any earlier release.

Each release that changes the tables adds a file to `versions/`. A migration is one transaction
under a lock: of replicas that start together one migrates, and a crash leaves the old tables.

env       the entry that Alembic calls
versions  one file for each change of the tables, in order
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from adapter_store.catalog.database import Database
from adapter_store.errors import CorruptData

HEAD = "0015"
"""The newest file of `versions/`."""

FIRST = "0001"
"""The first release, which had no migrations."""


def migrate(database: Database) -> None:
    """Upgrades the tables. Raises CorruptData for tables of a newer release, or of another
    program."""
    with database.read() as conn:
        if _find_revision(conn) == HEAD:
            return
    with database.migrating() as conn:
        found = _find_revision(conn)
        if found != HEAD:
            _upgrade(conn, found)


def _find_revision(conn: Connection) -> str:
    """Returns the revision of the tables; "" if there are none."""
    tables = set(inspect(conn).get_table_names())
    if "alembic_version" in tables:
        return str(conn.scalar(text("SELECT version_num FROM alembic_version")) or "")
    if "meta" not in tables:
        return ""
    schema = conn.scalar(text("SELECT value FROM meta WHERE key = 'schema_version'"))
    if schema != "1":
        raise _refused(str(schema))
    return FIRST


def _upgrade(conn: Connection, found: str) -> None:
    # Takes a tenth of a second to import: only a start that migrates does.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = conn
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found and found not in known:
        raise _refused(found)
    if found == FIRST:
        command.stamp(config, FIRST)
    command.upgrade(config, HEAD)


def _refused(found: str) -> CorruptData:
    return CorruptData(
        f"the catalog has schema {found}, this store knows schemas up to {HEAD}: "
        "it was made by a newer release",
        subject="schema_version",
    )
