"""A catalog in a temporary folder, with a clock that tests turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from adapter_store.catalog.catalog import Catalog
from adapter_store.catalog.database import Place
from tests.support.store.catalogs import Clock, Names


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["sqlite", "postgres"])
def place(request) -> Place:
    """Where an empty catalog lies: every test runs over both databases."""
    return request.getfixturevalue("catalog_dsn" if request.param == "postgres" else "catalog_file")


@pytest.fixture
def catalog(place, clock) -> Iterator[Catalog]:
    catalog = Catalog(place, event_retention=1000, clock=clock)
    yield catalog
    catalog.close()


@pytest.fixture
def names(catalog) -> Names:
    return Names(catalog)
