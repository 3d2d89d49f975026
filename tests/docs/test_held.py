"""docs/security.md says of every RPC what it holds, and names a test that shows its bound."""

from __future__ import annotations

import re
from pathlib import Path

from loadout.adapter_store.v1 import adapter_store_pb2
from loadout.inference.v1 import inference_pb2

ROOT = Path(__file__).parent.parent.parent
SERVICES = (
    adapter_store_pb2.DESCRIPTOR.services_by_name["AdapterStoreService"],
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
)
OTHERS = {"Health.Check", "Health.Watch", "ServerReflection.ServerReflectionInfo"}


def lines() -> dict[str, list[str]]:
    """Returns the columns of each RPC's line."""
    page = (ROOT / "docs" / "security.md").read_text()
    table = page.partition("### RPCs")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row for row in rows}


def test_every_rpc_has_a_line() -> None:
    own = {f"{found.name}.{method.name}" for found in SERVICES for method in found.methods}
    assert lines().keys() == own | OTHERS


def test_every_line_names_its_bound_and_a_test() -> None:
    tests = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        tests.update(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))
    for rpc, row in lines().items():
        assert len(row) == 6, rpc
        assert all(row), rpc
        assert row[-1].strip("`") in tests, rpc
