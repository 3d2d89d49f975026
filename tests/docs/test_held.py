"""The pages on security and limits name the memory and the limit of each RPC, route and place;
docs/development/tests-of-limits.md names the tests of each."""

from __future__ import annotations

import re

import pytest

from loadout.adapter_store.v1 import adapter_store_pb2
from loadout.inference.v1 import inference_pb2
from tests.support.all_tests import ROOT, all_tests

SECURITY, LIMITS = "security.md", "limits.md"
PROOFS = "development/tests-of-limits.md"
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


@pytest.mark.parametrize(
    ("page", "heading", "least", "columns"),
    [
        *((LIMITS, heading, len(OTHERS), 4) for heading in TABLES),
        (LIMITS, "## Connections without a known token", 9, 3),
        (LIMITS, "## HTTP routes", 20, 4),
        (SECURITY, "## Folders that somebody sends you", 6, 2),
        (SECURITY, "### Places in both services", 8, 4),
        (SECURITY, "### Places in the store", 20, 5),
    ],
)
def test_every_row_has_a_limit_and_tests(page: str, heading: str, least: int, columns: int) -> None:
    found = rows(page, heading)
    assert len(found) >= least
    for row in found:
        assert len(row) == columns, row[0]
        assert all(row), row[0]
    named = rows(PROOFS, f"## {heading.lstrip('# ')}")
    assert [without_links(row[0]) for row in named] == [without_links(row[0]) for row in found]


def test_the_page_of_proofs_names_tests() -> None:
    there_are, text = all_tests(), (ROOT / "docs" / PROOFS).read_text()
    lines = [line for line in text.splitlines() if line.startswith("| ") and "test_" in line]
    assert len(lines) > 90
    for line in lines:
        named = re.findall(r"`(test_\w+)`", line)
        assert named, line
        assert there_are.issuperset(named), line


def without_links(cell: str) -> str:
    """Returns a cell without the targets of links, which differ by page."""
    return re.sub(r"\]\([^)]*\)", "]", cell)
