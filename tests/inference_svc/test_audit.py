from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from inference_svc.access import Principal, Role
from inference_svc.audit import MAX_NAME_CHARS, Audit, AuditLine
from inference_svc.errors import AdapterNotFound
from servicekit.errors import InvalidSetting


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def audit(path: Path) -> Iterator[Audit]:
    audit = Audit(path)
    yield audit
    audit.close()


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_every_fact(audit: Audit, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO),
        audit.watching(AuditLine("ipv4:1", "PinAdapter", "n")) as line,
    ):
        line.identify(Principal("ops", frozenset(Role), None))
        line.digest = "sha256:d"
    (found,) = lines(path)
    assert json.loads(caplog.records[0].getMessage()) == found
    time = datetime.fromisoformat(str(found.pop("time")))
    assert abs(datetime.now(UTC) - time).total_seconds() < 60
    assert found == {
        "who": "ops",
        "roles": ["caller", "operator"],
        "peer": "ipv4:1",
        "what": "PinAdapter",
        "name": "n",
        "digest": "sha256:d",
        "result": "ok",
        "reason": "",
    }


@pytest.mark.parametrize(
    ("error", "result", "reason"),
    [
        (AdapterNotFound("no"), "refused", "ADAPTER_NOT_FOUND"),
        (InvalidSetting("policy_file"), "refused", "SETTING_INVALID"),
        (asyncio.CancelledError(), "cancelled", ""),
        (ZeroDivisionError(), "failed", "ZeroDivisionError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_how_it_ended(
    audit: Audit, path: Path, error: BaseException, result: str, reason: str
) -> None:
    with (
        pytest.raises(type(error)),
        audit.watching(AuditLine("", "LoadAdapter", "x" * 999)),
    ):
        raise error
    (found,) = lines(path)
    assert (found["result"], found["reason"]) == (result, reason)
    assert found["name"] == "x" * MAX_NAME_CHARS


def test_a_file_that_was_moved_away_is_opened_anew(audit: Audit, path: Path) -> None:
    audit.write(AuditLine(what="first"))
    path.rename(path.with_name("old"))
    audit.write(AuditLine(what="second"))
    audit.reopen()
    audit.write(AuditLine(what="third"))
    assert [line["what"] for line in lines(path.with_name("old"))] == ["first", "second"]
    assert [line["what"] for line in lines(path)] == ["third"]


def test_a_line_that_cannot_be_written_is_said(caplog: pytest.LogCaptureFixture) -> None:
    audit = Audit(Path("/dev/full"))
    audit.write(AuditLine(what="lost"))
    audit.close()
    audit.write(AuditLine(what="to the logger only"))
    assert "an audit line is lost" in caplog.text
