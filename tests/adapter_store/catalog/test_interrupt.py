"""What is read for a caller that has left ends; what is read for others does not."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from adapter_store.catalog.database import Interrupt, SqliteDatabase
from adapter_store.errors import CatalogUnavailable
from tests.support.store.catalogs import ENDLESS
from tests.support.wait import TIMEOUT_S


def test_a_statement_ends_with_its_caller(tmp_path: Path) -> None:
    database, interrupt = SqliteDatabase(tmp_path / "db"), Interrupt()
    ends: list[Exception] = []
    begun = threading.Event()

    def read() -> None:
        try:
            with database.read() as conn:
                begun.set()
                conn.exec_driver_sql(ENDLESS)
        except CatalogUnavailable as error:
            ends.append(error)

    thread = threading.Thread(target=interrupt.run, args=(read,), daemon=True)
    thread.start()
    assert begun.wait(TIMEOUT_S)
    assert interrupt.set()
    interrupt.cancel()  # the statement may not have begun yet
    thread.join(TIMEOUT_S)
    assert not interrupt.set()
    assert len(ends) == 1
    with database.read() as conn:  # over the same connection
        assert conn.exec_driver_sql("SELECT 1").scalar_one() == 1
    database.close()


def test_a_caller_that_has_left_reads_nothing(tmp_path: Path) -> None:
    database, interrupt = SqliteDatabase(tmp_path / "db"), Interrupt()
    assert not interrupt.set()
    interrupt.cancel()

    def read() -> None:
        with database.read():
            raise AssertionError("read")

    with pytest.raises(CatalogUnavailable, match="has left"):
        interrupt.run(read)
    database.close()
