"""The drills of docs/operations/backup.md, as they stand: a backup of a store that runs, and the
restore of it into an empty place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from adapter_store.catalog.catalog import Catalog
from bench.store import catalog as store_catalog
from servicekit.refs import AdapterRef
from tests.support.store.adapters import tiny_layout

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[3] / "docs" / "operations" / "backup.md").read_text()
NUM_ADAPTERS = 10


def run(name: str, *programs: Path, **variables: object) -> None:
    """A drill by its mark; `programs` are folders of what it calls."""
    found = re.search(rf"<!-- drill: {name} -->\n```sh\n(.*?)```", PAGE, re.DOTALL)
    assert found, name
    folders = [Path(sys.executable).parent, *programs, os.environ["PATH"]]
    environment = os.environ | {key: str(value) for key, value in variables.items()}
    environment["PATH"] = os.pathsep.join(map(str, folders))
    command = ["bash", "-euo", "pipefail", "-c", found[1]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
def test_sqlite_and_a_folder(serve, make_adapter, tmp_path):
    data, backup, restored = (tmp_path / name for name in ("data", "backup", "restored"))
    backup.mkdir()
    served = serve(data_dir=data)
    kept = served.client.register("kept", make_adapter(folder="a", seed=1)).adapter
    run("sqlite backup", DATA=data, BACKUP=backup)
    lost = served.client.register("lost", make_adapter(folder="b", seed=2)).adapter
    served.stop()
    run("sqlite restore", DATA=restored, BACKUP=backup)
    client = serve(data_dir=restored).client
    assert client.get("kept") == kept
    assert client.pull(kept.digest, client.register_layout(tiny_layout())).is_whole
    # What came after the backup is registered again.
    again = client.register("lost", tmp_path / "b").adapter
    assert (again.version, again.digest) == (lost.version, lost.digest)


def test_postgresql(postgres, catalog_dsn, tmp_path):
    catalog = Catalog(catalog_dsn, event_retention=NUM_ADAPTERS)
    store_catalog.fill(catalog, NUM_ADAPTERS)
    ref = AdapterRef(store_catalog.name_of(3))
    kept = catalog.names.get(ref)
    run("postgresql backup", postgres.programs, DSN=address(catalog_dsn), BACKUP=tmp_path)
    catalog.close()
    empty_dsn = postgres.create_database()
    run("postgresql restore", postgres.programs, DSN=address(empty_dsn), BACKUP=tmp_path)
    restored = Catalog(empty_dsn, event_retention=NUM_ADAPTERS)
    assert restored.names.get(ref) == kept
    restored.close()
    postgres.drop_database(empty_dsn)


def address(dsn: str) -> str:
    """Returns the DSN as PostgreSQL's own programs read it."""
    return dsn.replace("+psycopg", "")
