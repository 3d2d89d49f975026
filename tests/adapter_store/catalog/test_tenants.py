"""Nothing that one tenant does shows to another: a tenant sees the same catalog with and without
the others in it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapter_store.catalog.catalog import Catalog
from adapter_store.catalog.tables.lookup import VersionsPage
from adapter_store.catalog.tables.version_rows import NewVersion
from adapter_store.core import AdapterRecord, ImageKey, Quota
from servicekit.errors import ServiceError
from servicekit.refs import AdapterName, AdapterRef

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NAMES = ("x", "y", "z")
SOURCE_BYTES = 100
QUOTA = Quota(max_adapters=2, max_bytes=2 * SOURCE_BYTES)
LAYOUT = "L"
NUM_EXAMPLES = 15

# (whether it is A, whether the name is A's, what, name, digest or version)
operations = st.lists(
    st.tuples(
        st.booleans(),
        st.booleans(),
        st.sampled_from(["register", "remove", "rollback", "prune", "pin", "unpin"]),
        st.sampled_from(NAMES),
        st.integers(0, 2),
    ),
    max_size=20,
)


@dataclass
class World:
    """A catalog, and two tenants and some contents that no other example has."""

    catalog: Catalog
    number: int

    def __post_init__(self) -> None:
        self.start_revision = self.catalog.history.revision()
        self.digests = [f"d{i}-{self.number}" for i in range(3)]

    def tenant(self, is_a: bool) -> str:
        return f"{'a' if is_a else 'b'}{self.number}"

    def apply(self, by_a: bool, of_a: bool, what: str, name: str, number: int) -> object:
        """What an operation of a tenant gives; only its own names may be registered."""
        who = self.tenant(by_a)
        tenants = frozenset({who})
        ref = AdapterName(self.tenant(of_a), name)
        try:
            if what == "register":
                digest = self.digests[number]
                new = NewVersion(
                    AdapterName(who, name), digest, "base", f"of {who}", 1, (), SOURCE_BYTES
                )
                return seen(self.catalog.names.register(new, "", QUOTA)[0])
            if what == "remove":
                return self.catalog.names.remove(ref, number, tenants)[0]
            if what == "rollback":
                return seen(self.catalog.names.rollback(ref, number + 1, "", tenants, QUOTA)[0])
            if what == "prune":
                return self.catalog.names.prune(ref, number + 1, tenants).deleted_versions
            by = AdapterRef(ref) if number else AdapterRef(digest=self.digests[0])
            return seen(self.catalog.names.set_pinned(by, what == "pin", 1 << 30, tenants)[0])
        except ServiceError as error:
            return type(error), error.message, error.subject

    def view_of_a(self) -> list[object]:
        """All that a tenant can ask for."""
        tenants = frozenset({self.tenant(True)})
        catalog = self.catalog
        records, token, _ = catalog.names.page(1000, "", "", tenants)
        found: list[object] = [[seen(record) for record in records], token]
        found += [
            (event.kind, event.name, event.version, event.digest)
            for event in catalog.history.since(self.start_revision, 1000)
            if event.tenant in tenants
        ]
        refs = [AdapterRef(digest=digest) for digest in self.digests]
        for is_a, name in itertools.product((True, False), NAMES):
            full_name = AdapterName(self.tenant(is_a), name)
            refs += [AdapterRef(full_name, version) for version in (None, 1, 2, 3)]
            found.append(answer(catalog.names.versions, full_name, 0, "", tenants))
        found += [answer(catalog.names.get, ref, tenants) for ref in refs]
        for digest in self.digests:
            found.append(
                catalog.images.access(ImageKey(digest, LAYOUT), timedelta(hours=1), tenants)
            )
        return found


def answer(function: Callable[..., Any], *arguments: object) -> object:
    try:
        found = function(*arguments)
    except ServiceError as error:
        return type(error), error.message, error.subject
    if isinstance(found, VersionsPage):
        return [seen(record) for record in found.records], found.current_version
    return seen(found[0])


def seen(record: AdapterRecord) -> AdapterRecord:
    """Without the times, which tell when it happened and not what."""
    return replace(record, create_time=NOW, update_time=NOW, delete_time=None)


@pytest.fixture(params=["sqlite", "postgres"])
def catalogs(request, tmp_path):
    """Two empty ones."""
    with ExitStack() as stack:
        made = []
        for name in ("both", "alone"):
            if request.param == "postgres":
                server = request.getfixturevalue("postgres")
                place = server.create_database(request.getfixturevalue("migrated_dsn"))
                stack.callback(server.drop_database, place)
            else:
                place = tmp_path / name
            made.append(Catalog(place, event_retention=1_000_000, clock=lambda: NOW))
            stack.callback(made[-1].close)
        yield made


@pytest.mark.slow
def test_other_tenants_are_invisible(catalogs):
    both, alone = catalogs
    for catalog in catalogs:
        catalog.layouts.add(LAYOUT, "base", "{}")
    numbers = itertools.count()

    @settings(max_examples=NUM_EXAMPLES)
    @given(operations)
    def run(steps) -> None:
        number = next(numbers)
        crowded, lonely = World(both, number), World(alone, number)
        for step in steps:
            outcome = crowded.apply(*step)
            if step[0]:
                assert outcome == lonely.apply(*step)
        assert crowded.view_of_a() == lonely.view_of_a()

    run()
