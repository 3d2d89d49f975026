"""Parts of a debug bundle: redacted, and each on its own."""

from __future__ import annotations

import asyncio
import json

import pytest

from servicekit.telemetry import debug_bundle
from servicekit.telemetry.debug_bundle import Part, PartMaker, make_parts


def collect(makers: dict[str, PartMaker]) -> dict[str, Part]:
    async def run() -> dict[str, Part]:
        return {part.name: part async for part in make_parts(makers, ["known-secret"])}

    return asyncio.run(run())


async def tree() -> object:
    return {"note": "has known-secret", "password": "abc"}


async def text() -> object:
    return "metric 1 known-secret"


async def fail() -> object:
    raise RuntimeError("broken: known-secret")


async def hang() -> object:
    return await asyncio.Event().wait()


def test_secrets_are_hidden_in_every_part() -> None:
    found = collect({"a.json": tree, "b.txt": text})
    assert json.loads(found["a.json"].content) == {"note": "has ***", "password": "***"}
    assert found["b.txt"].content == b"metric 1 ***"


def test_a_part_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug_bundle, "PART_SECONDS", 0.05)
    found = collect({"failed.json": fail, "late.json": hang, "b.txt": text})
    failed = found["failed.json"]
    assert failed.content == b""
    assert failed.error.startswith("RuntimeError at test_debug_bundle.py:")
    assert failed.error.endswith(": broken: ***")
    assert found["late.json"].error == "not made within 0.05 s"
    assert found["b.txt"].content
