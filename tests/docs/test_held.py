"""The pages on security and limits name the memory, the limit and the tests of each RPC and
place."""

from __future__ import annotations

import re

import pytest

from loadout.adapter_store.v1 import adapter_store_pb2
from loadout.inference.v1 import inference_pb2
from tests.support.all_tests import ROOT, all_tests

SECURITY, LIMITS = "security.md", "limits.md"
SERVICES = (
    adapter_store_pb2.DESCRIPTOR.services_by_name["AdapterStoreService"],
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
)
OTHERS = {"Health.Check", "Health.Watch", "ServerReflection.ServerReflectionInfo"}
TABLES = {
    "### RPCs of the store": {method.name for method in SERVICES[0].methods},
    "### RPCs of the inference service": {method.name for method in SERVICES[1].methods},
    "### RPCs of both services": OTHERS,
}


def rows(page: str, heading: str) -> list[list[str]]:
    """Returns the rows of the table under a heading, by columns."""
    text = (ROOT / "docs" / page).read_text()
    table = re.split(r"\n##+ ", text.partition(f"{heading}\n")[2], maxsplit=1)[0]
    found = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return found[1:]  # without its head


@pytest.mark.parametrize("heading", TABLES)
def test_every_rpc_has_one_row(heading: str) -> None:
    named = [rpc for row in rows(LIMITS, heading) for rpc in re.findall(r"`([\w.]+)`", row[0])]
    assert sorted(named) == sorted(TABLES[heading])


@pytest.mark.parametrize("heading", TABLES)
def test_every_row_names_its_limit_and_a_test(heading: str) -> None:
    tests = all_tests()
    for row in rows(LIMITS, heading):
        assert len(row) == 5, row[0]
        assert all(row), row[0]
        assert row[-1].strip("`") in tests, row[0]


@pytest.mark.parametrize(
    ("page", "heading", "least", "columns"),
    [
        (SECURITY, "### Places in both services", 8, 5),
        (SECURITY, "### Places in the store", 20, 6),
        (LIMITS, "## Connections without a known token", 9, 4),
    ],
)
def test_every_place_names_its_limit_and_tests(
    page: str, heading: str, least: int, columns: int
) -> None:
    places, tests = rows(page, heading), all_tests()
    assert len(places) >= least
    for row in places:
        assert len(row) == columns, row[0]
        assert all(row), row[0]
        named = re.findall(r"`(\w+)`", row[-1])
        assert named, row[0]
        assert tests.issuperset(named), row[0]


def test_everything_that_a_folder_may_have_names_tests() -> None:
    things, tests = rows(SECURITY, "## Folders that somebody sends you"), all_tests()
    assert len(things) > 5
    for row in things:
        assert len(row) == 3, row[0]
        named = re.findall(r"`(\w+)`", row[-1])
        assert named, row[0]
        assert tests.issuperset(named), row[0]
