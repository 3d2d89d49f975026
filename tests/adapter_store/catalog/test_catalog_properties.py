"""Any order of registrations, deletions, pins and restarts, held against a plain model."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from adapter_store.catalog.catalog import Catalog
from adapter_store.catalog.tables.version_rows import NewVersion
from adapter_store.core import EventKind
from adapter_store.errors import Conflict
from servicekit.errors import NotFound
from servicekit.refs import AdapterName, AdapterRef

names = st.sampled_from([AdapterName("t", "a"), AdapterName("t", "b"), AdapterName("u", "a")])
digests = st.sampled_from(["d1", "d2", "d3"])


@dataclass
class Model:
    """A name as the contract describes it."""

    versions: dict[int, str] = field(default_factory=dict)
    current: int = 0
    last: int = 0
    pinned: set[int] = field(default_factory=set)
    revision: int = 0

    def superseded(self, keep: int) -> list[int]:
        oldest_first = sorted(self.versions)
        return [
            version
            for version in oldest_first[: max(0, len(oldest_first) - keep)]
            if version != self.current and version not in self.pinned
        ]


class CatalogMachine(RuleBasedStateMachine):
    def __init__(self, dsn: str = "") -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.place = dsn or self.folder / "catalog.sqlite3"
        self.catalog = self.open()
        self.models: dict[AdapterName, Model] = {}
        self.revision = 0

    def open(self) -> Catalog:
        return Catalog(self.place, event_retention=10_000)

    def teardown(self) -> None:
        self.catalog.close()
        shutil.rmtree(self.folder)

    def changed(self, model: Model) -> None:
        self.revision += 1
        model.revision = self.revision

    @rule(name=names, digest=digests, pinned=st.booleans(), keep=st.sampled_from([0, 1, 2]))
    def register(self, name: AdapterName, digest: str, pinned: bool, keep: int) -> None:
        new = NewVersion(name, digest, "base", "", 1, (), 1, pinned=pinned)
        record, revision, deleted, *_ = self.catalog.names.register(new, keep=keep)
        model = self.models.setdefault(name, Model())
        before = model.revision
        known = [version for version, d in model.versions.items() if d == digest]
        if known != [model.current]:
            version = known[0] if known else model.last + 1
            pinned = pinned or model.current in model.pinned or version in model.pinned
            model.pinned.discard(model.current)
            model.versions[version] = digest
            model.current, model.last = version, max(version, model.last)
            self.changed(model)
        elif pinned and model.current not in model.pinned:
            self.changed(model)
        if pinned:
            model.pinned.add(model.current)
        superseded = model.superseded(keep) if keep else []
        for version in superseded:
            del model.versions[version]
        if superseded and model.revision == before:
            self.changed(model)
        assert deleted == tuple(superseded)
        assert (record.version, revision) == (model.current, model.revision)

    @rule(name=names, keep=st.integers(1, 3))
    def prune(self, name: AdapterName, keep: int) -> None:
        model = self.models.get(name, Model())
        if not model.versions:
            with pytest.raises(NotFound):
                self.catalog.names.prune(name, keep)
            return
        superseded = model.superseded(keep)
        for version in superseded:
            del model.versions[version]
        if superseded:
            self.changed(model)
        assert self.catalog.names.prune(name, keep)[:2] == (tuple(superseded), model.revision)

    @rule(name=names, digest=digests)
    def register_if_current(self, name: AdapterName, digest: str) -> None:
        model = self.models.get(name, Model())
        if model.versions.get(model.current) != digest:
            new = NewVersion(name, "d9", "base", "", 1, (), 1)
            with pytest.raises(Conflict):
                self.catalog.names.register(new, digest)

    @rule(name=names, version=st.integers(0, 3))
    def remove(self, name: AdapterName, version: int) -> None:
        model = self.models.get(name, Model())
        if not model.versions or (version and version not in model.versions):
            with pytest.raises(NotFound):
                self.catalog.names.remove(name, version)
            return
        self.changed(model)
        assert self.catalog.names.remove(name, version)[1] == self.revision
        for number in [version] if version else list(model.versions):
            del model.versions[number]
            model.pinned.discard(number)
        if model.current not in model.versions:
            model.current = max(model.versions, default=0)

    @rule(name=names, version=st.integers(0, 3), pinned=st.booleans())
    def pin(self, name: AdapterName, version: int, pinned: bool) -> None:
        model = self.models.get(name, Model())
        number = version or model.current
        ref = AdapterRef(name, version or None)
        if number not in model.versions:
            with pytest.raises(NotFound):
                self.catalog.names.set_pinned(ref, pinned, 1)
            return
        if (number in model.pinned) != pinned:
            self.changed(model)
        (model.pinned.add if pinned else model.pinned.discard)(number)
        record, revision = self.catalog.names.set_pinned(ref, pinned, 1)
        assert (record.pinned, revision) == (pinned, self.revision)

    @rule()
    def restart(self) -> None:
        self.catalog.close()
        self.catalog = self.open()

    @invariant()
    def names_are_as_the_model_says(self) -> None:
        page, _, revision = self.catalog.names.page()
        assert revision == self.revision
        live = sorted((n.tenant, n.name) for n, m in self.models.items() if m.current)
        assert [(r.name.tenant, r.name.name) for r in page] == live
        for name, model in self.models.items():
            for version in range(1, model.last + 1):
                if version in model.versions:
                    record, _ = self.catalog.names.get(AdapterRef(name, version))
                    assert record.digest == model.versions[version]
                    assert record.pinned == (version in model.pinned)
                else:
                    with pytest.raises(NotFound):
                        self.catalog.names.get(AdapterRef(name, version))

    @invariant()
    def the_history_has_no_gaps_and_ends_where_names_are(self) -> None:
        events = self.catalog.history.since(0, 100_000)
        assert [event.revision for event in events] == list(range(1, self.revision + 1))
        last = {event.name: event for event in events}
        for name, model in self.models.items():
            if str(name) in last:
                event = last[str(name)]
                assert event.version == model.current
                assert (event.kind is EventKind.DELETED) == (model.current == 0)
                assert model.current == 0 or event.digest == model.versions[model.current]


OPTIONS = settings(
    max_examples=10,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
CatalogMachine.TestCase.settings = OPTIONS
TestCatalog = pytest.mark.slow(CatalogMachine.TestCase)


@pytest.mark.long
def test_many_more():
    run_state_machine_as_test(CatalogMachine, settings=settings(OPTIONS, max_examples=100))


@pytest.mark.parametrize("max_examples", [2, pytest.param(20, marks=pytest.mark.long)])
def test_the_same_over_postgres(postgres, migrated_dsn, max_examples):
    run_state_machine_as_test(
        lambda: CatalogMachine(postgres.create_database(copy_of=migrated_dsn)),
        settings=settings(OPTIONS, max_examples=max_examples),
    )
