from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
from datetime import UTC, datetime

import pytest

from adapter_store.api.servicer import StoreAuditEntry
from adapter_store.core import ROLES, AdapterRecord, Recorded
from servicekit.auth.audit import MAX_NAME_CHARS, Audit, AuditEntry
from servicekit.errors import InvalidSetting, NotFound, Unauthenticated, Unavailable
from servicekit.refs import AdapterName

NOW = datetime(2026, 1, 2, tzinfo=UTC)
RECORD = AdapterRecord(AdapterName("t", "n"), 3, "sha256:d", "", "base", 1, (), 1, NOW, NOW)


LOGGER = logging.getLogger("a_service.audit")


def open_audit(path):
    return Audit(path, StoreAuditEntry, frozenset({"PinAdapter"}), LOGGER)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "audit.jsonl"


@pytest.fixture
def audit(path):
    audit = open_audit(path)
    yield audit
    audit.close()


def lines(path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_every_fact(audit, path, caplog):
    with (
        caplog.at_level(logging.INFO),
        audit.record(audit.entry("PinAdapter", "n", "ipv4:1")) as entry,
    ):
        entry.set_caller(ROLES.principal("ops", ["server", "admin"], None))
        entry.describe(RECORD, 7)
    (found,) = lines(path)
    assert abs(datetime.now(UTC) - datetime.fromisoformat(found.pop("time"))).total_seconds() < 60
    assert found == {
        "who": "ops",
        "roles": ["admin", "server"],
        "peer": "ipv4:1",
        "what": "PinAdapter",
        "name": "t/n",
        "version": 3,
        "digest": "sha256:d",
        "revision": 7,
        "deleted_versions": [],
        "ignored_config_keys": [],
        "result": "ok",
        "reason": "",
    }
    (record,) = caplog.records
    assert record.name == "a_service.audit"
    assert json.loads(json.dumps(record.audit)) | {"time": ""} == found | {"time": ""}


@pytest.mark.parametrize(
    ("error", "result", "reason"),
    [
        (NotFound("no adapter"), "refused", "NOT_FOUND"),
        (InvalidSetting("policy_file"), "refused", "SETTING_INVALID"),
        (asyncio.CancelledError(), "cancelled", ""),
        (GeneratorExit(), "cancelled", ""),
        (RuntimeError("password is hunter2"), "failed", "RuntimeError"),
    ],
)
def test_how_a_call_ended(audit, path, error, result, reason):
    with pytest.raises(type(error)), audit.record(audit.entry("DeleteAdapter", "n")):
        raise error
    (found,) = lines(path)
    assert (found["result"], found["reason"]) == (result, reason)
    assert "hunter2" not in path.read_text()


@pytest.mark.parametrize("outcome", ["recorded", "refused", "cancelled"])
@pytest.mark.parametrize("stays", [True, False])
def test_work_whose_caller_has_left_is_recorded_with_its_result(audit, path, outcome, stays):
    async def main() -> None:
        recording = asyncio.get_running_loop().create_future()

        def end() -> None:
            if outcome == "recorded":
                recording.set_result(Recorded(RECORD, 9))
            elif outcome == "refused":
                recording.set_exception(NotFound("gone"))
            else:
                recording.cancel()

        try:
            with audit.record(audit.entry("RegisterAdapter", "n")) as entry:
                entry.pending = recording
                if not stays:
                    raise asyncio.CancelledError
                end()
                await recording
        except (asyncio.CancelledError, NotFound):
            pass
        if not stays:
            assert path.read_text() == ""
            end()
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    asyncio.run(main())
    (found,) = lines(path)
    expected = {"recorded": ("ok", 3), "refused": ("refused", 0), "cancelled": ("cancelled", 0)}
    assert (found["result"], found["version"]) == expected[outcome]


def test_a_hostile_name_stays_in_its_line(audit, path):
    audit.write(StoreAuditEntry("RegisterAdapter", 'x"}\n{"who": "root"' + "y" * 10_000))
    (found,) = lines(path)
    assert found["who"] == ""
    assert len(found["name"]) == MAX_NAME_CHARS


def test_unauthenticated_changes_are_recorded(audit, path):
    for what in ("PinAdapter", "GetAdapter"):
        audit.refuse(what, "ipv4:1", Unauthenticated("no token"))
    [found] = lines(path)
    assert (found["what"], found["peer"], found["who"]) == ("PinAdapter", "ipv4:1", "")
    assert (found["result"], found["reason"]) == ("refused", "UNAUTHENTICATED")


def test_a_service_without_fields_of_its_own():
    assert list(AuditEntry("PinAdapter").facts()) == [
        *("time", "who", "roles", "peer", "what", "name", "digest", "result", "reason")
    ]


def test_a_file_that_was_moved_away_is_opened_anew(audit, path, tmp_path):
    audit.write(StoreAuditEntry("one"))
    path.rename(tmp_path / "old")
    audit.write(StoreAuditEntry("two"))
    audit.reopen()
    audit.write(StoreAuditEntry("three"))
    assert [line["what"] for line in lines(tmp_path / "old")] == ["one", "two"]
    assert [line["what"] for line in lines(path)] == ["three"]
    assert path.stat().st_mode & 0o007 == 0


def test_what_was_there_stays(path):
    path.write_text('{"what": "before"}\n')
    audit = open_audit(path)
    audit.write(StoreAuditEntry("after"))
    audit.close()
    audit.write(StoreAuditEntry("closed"))
    assert [line["what"] for line in lines(path)] == ["before", "after"]


def test_a_file_that_cannot_be_reopened_keeps_the_old_one(audit, path):
    path.rename(path.with_suffix(".old"))
    path.mkdir()
    with pytest.raises(OSError, match=r"audit\.jsonl"):
        audit.reopen()
    audit.write(StoreAuditEntry("still"))
    assert [line["what"] for line in lines(path.with_suffix(".old"))] == ["still"]


def test_a_line_that_cannot_be_written_is_an_error_in_the_log(path, caplog):
    audit = open_audit(path)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, audit._file)
    os.close(full)
    with caplog.at_level(logging.ERROR):
        audit.write(StoreAuditEntry("lost"))
    audit.close()
    assert "audit line lost" in caplog.text


def test_without_a_file_lines_are_logged_only(caplog):
    with caplog.at_level(logging.INFO):
        open_audit(None).write(StoreAuditEntry("one"))
    assert caplog.records[0].audit["what"] == "one"


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        open_audit(tmp_path / "nowhere" / "audit.jsonl")


@pytest.fixture
def full(path):
    """An audit that is required, on a full disk."""
    path.symlink_to("/dev/full")
    audit = Audit(path, StoreAuditEntry, frozenset({"PinAdapter"}), LOGGER, is_required=True)
    yield audit
    audit.close()


def test_what_cannot_be_audited_is_refused(full, caplog):
    entry = full.entry("PinAdapter")
    with pytest.raises(Unavailable, match="--audit-required"), full.record(entry):
        full.begin(entry)
    assert "audit file not writable" in caplog.text


def test_without_the_requirement_a_lost_line_is_logged(path, caplog):
    path.symlink_to("/dev/full")
    audit = open_audit(path)
    with audit.record(audit.entry("PinAdapter")) as entry:
        audit.begin(entry)
    audit.close()
    assert "audit line lost" in caplog.text


def test_a_required_audit_has_two_lines_of_a_call(path):
    audit = Audit(path, StoreAuditEntry, frozenset({"PinAdapter"}), LOGGER, is_required=True)
    with audit.record(audit.entry("PinAdapter", "n")) as entry:
        audit.begin(entry)
        assert [line["result"] for line in lines(path)] == ["started"]
    audit.close()
    assert [line["result"] for line in lines(path)] == ["started", "ok"]


def torn(audit, path) -> None:
    """Leaves a part of a line at the end, as a full disk does."""
    before = path.stat().st_size if path.exists() else 0
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before + 10, limits[1]))
    try:
        audit.write(StoreAuditEntry("torn"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.stat().st_size == before + 10


@pytest.mark.parametrize("how", ["goes on", "reopens", "starts again"])
def test_a_line_after_a_torn_one_stands_alone(path, how):
    audit = open_audit(path)
    audit.write(StoreAuditEntry("one"))
    torn(audit, path)
    if how == "reopens":
        audit.reopen()
    elif how == "starts again":
        audit.close()
        audit = open_audit(path)
    audit.write(StoreAuditEntry("two"))
    audit.write(StoreAuditEntry("three"))
    audit.close()
    found = path.read_text().splitlines()
    assert len(found) == 4
    assert [json.loads(found[i])["what"] for i in (0, 2, 3)] == ["one", "two", "three"]
