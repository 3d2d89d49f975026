"""docs/limits.md has a row for each field of a request, each table of the catalog, and each field
of the store's answers: its content, how long it is kept, its limit and tests."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from inference_svc.api.http.generation_body import AdapterPartBody
from inference_svc.api.http.request import Body
from tests.support.all_tests import all_tests
from tools.bounds_texts.inference import HTTP_FIELDS, INFERENCE_FIELDS, PULLED_FIELDS
from tools.bounds_texts.line import Line, expanded
from tools.bounds_texts.store import STORE_FIELDS, TABLES
from tools.pages import bounds_docs, bounds_inventory

KINDS: dict[str, tuple[Sequence[Line], Collection[str]]] = {
    "store": (STORE_FIELDS, bounds_inventory.store_fields()),
    "inference": (INFERENCE_FIELDS, bounds_inventory.inference_fields()),
    "http": (HTTP_FIELDS, bounds_inventory.http_fields()),
    "pulled": (PULLED_FIELDS, bounds_inventory.pulled_fields()),
    "tables": (TABLES, bounds_inventory.tables()),
}


def without_a_line(lines: Sequence[Line], there_are: Collection[str]) -> set[str]:
    return set(there_are) - {name for line in lines for name in line.of}


@pytest.mark.parametrize("kind", KINDS)
def test_everything_has_one_line(kind: str) -> None:
    lines, there_are = KINDS[kind]
    assert not without_a_line(lines, there_are)
    said = [name for line in lines for name in line.of]
    assert sorted(said) == sorted(there_are), "a line of what is no more, or two of one"


@pytest.mark.parametrize("kind", KINDS)
def test_every_line_says_all_and_names_tests(kind: str) -> None:
    tests = all_tests()
    for line in KINDS[kind][0]:
        assert all((line.of, line.holds, line.how_long, line.for_whom, line.bounded_by)), line.of
        assert line.tests, line.of
        assert tests.issuperset(line.tests), set(line.tests) - tests
        assert "|" not in "".join(line[1:5]), line.of


def test_the_page_is_as_it_is_generated() -> None:
    page = bounds_docs.PATH.read_text()
    assert page == bounds_docs.written(page), "make docs"


def test_a_new_field_is_found_wherever_it_is() -> None:
    """Also in a message within a message, and whatever it holds."""
    pool = descriptor_pool.DescriptorPool()
    file = descriptor_pb2.FileDescriptorProto(name="new.proto", package="loadout.new")
    inner = file.message_type.add(name="Inner")
    inner.field.add(name="added", number=1, type=5, label=1)
    outer = file.message_type.add(name="Request")
    outer.field.add(name="known", number=1, type=9, label=1)
    outer.field.add(name="inner", number=2, type=11, label=3, type_name=".loadout.new.Inner")
    pool.Add(file)
    message = pool.FindMessageTypeByName("loadout.new.Request")
    assert set(bounds_inventory.paths_of(message)) == {"known", "inner", "inner.added"}
    assert without_a_line(STORE_FIELDS, {"New.field"}) == {"New.field"}


def test_braces_stand_for_each_in_turn() -> None:
    assert [*expanded("{A,B}.{c,d}")] == ["A.c", "A.d", "B.c", "B.d"]


def test_limits_come_from_the_tables_of_requests() -> None:
    assert bounds_inventory.limits("RegisterAdapter.labels", of_store=True) == ["64 entries"]
    assert bounds_inventory.limits("ListAdapters.filter", of_store=True) == ["4,096 characters"]
    of_ids = bounds_inventory.limits("Generate.token_ids.ids", of_store=False)
    assert of_ids == ["twice `--max-model-len` entries"]
    assert "1,024 entries of `tenants`" in bounds_docs.render()


def test_every_body_is_among_them() -> None:
    """A body that a new route reads is a class of `Body` in a module of the routes."""
    found = {
        kind
        for kind in all_bodies(Body)
        if kind.__name__.endswith("Body") and not any(True for _ in kind.__subclasses__())
    }
    parts = {AdapterPartBody}
    assert found - parts == set(bounds_inventory.BODIES)


def all_bodies(kind: type[Body]) -> Iterator[type[Body]]:
    for each in kind.__subclasses__():
        yield each
        yield from all_bodies(each)
