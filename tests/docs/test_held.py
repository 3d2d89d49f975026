"""docs/security.md says of every RPC what it holds, and names a test that shows its bound."""

from __future__ import annotations

import re

from loadout.adapter_store.v1 import adapter_store_pb2
from loadout.inference.v1 import inference_pb2
from tests.support.all_tests import ROOT, all_tests

SERVICES = (
    adapter_store_pb2.DESCRIPTOR.services_by_name["AdapterStoreService"],
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
)
OTHERS = {"Health.Check", "Health.Watch", "ServerReflection.ServerReflectionInfo"}


def rows(heading: str) -> list[list[str]]:
    """Returns the lines of the table under a heading, by columns."""
    page = (ROOT / "docs" / "security.md").read_text()
    table = page.partition(f"{heading}\n")[2].partition("\n## ")[0]
    found = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return found[1:]  # without its head


def lines() -> dict[str, list[str]]:
    """Returns the columns of each RPC's line."""
    return {row[0].strip("`"): row for row in rows("### RPCs") if row[0].startswith("`")}


def test_every_rpc_has_a_line() -> None:
    own = {f"{found.name}.{method.name}" for found in SERVICES for method in found.methods}
    assert lines().keys() == own | OTHERS


def test_every_line_names_its_bound_and_a_test() -> None:
    tests = all_tests()
    for rpc, row in lines().items():
        assert len(row) == 6, rpc
        assert all(row), rpc
        assert row[-1].strip("`") in tests, rpc


def test_every_place_of_the_store_names_its_bound_and_tests() -> None:
    places, tests = rows("## Limits in the store"), all_tests()
    assert len(places) > 10
    for row in places:
        assert len(row) == 6, row[0]
        assert all(row), row[0]
        named = re.findall(r"`(\w+)`", row[-1])
        assert named, row[0]
        assert tests.issuperset(named), row[0]


def test_everything_that_a_folder_may_have_names_tests() -> None:
    things, tests = rows("## Folders that somebody sends you"), all_tests()
    assert len(things) > 5
    for row in things:
        assert len(row) == 3, row[0]
        named = re.findall(r"`(\w+)`", row[-1])
        assert named, row[0]
        assert tests.issuperset(named), row[0]
