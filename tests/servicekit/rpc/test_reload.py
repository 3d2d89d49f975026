"""What is taken over of policy and certificates, and what is said of it: one look at a time."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapter_store.config import StoreSettings
from servicekit.auth.audit import Audit, AuditEntry
from servicekit.auth.policy import PolicyFile
from servicekit.errors import InvalidSetting, Unauthenticated
from servicekit.rpc.reload import Reloader, reloading
from servicekit.rpc.tls import CertificateFiles
from tests.support.access.certificates import Authority
from tests.support.access.policies import audit_lines, token_lines, token_of, write_policy
from tests.support.access.services import STORE
from tests.support.wait import until_async

STAYER, LEAVER = token_lines("stayer", ["reader"]), token_lines("leaver", ["reader"])
POLICY, CERTIFICATES = "policy_file", "tls_cert_file"


class Running:
    """A service's policy, certificates and audit, and their reloader."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder)
        self.cert, self.key = self.authority.issue("server")
        self.policy_path = write_policy(folder, STAYER, LEAVER)
        self.audit_path = folder / "audit.jsonl"
        self.settings = StoreSettings(
            policy_file=self.policy_path,
            audit_file=self.audit_path,
            tls_cert_file=self.cert,
            tls_key_file=self.key,
        )
        self.policies = PolicyFile(self.policy_path, STORE.parse, STORE.unguarded)
        self.certificates = CertificateFiles(self.settings)
        audit_log = logging.getLogger("a_service.audit")
        self.audit = Audit(self.audit_path, AuditEntry, frozenset(), audit_log)
        self.reloader = Reloader(self.policies, self.certificates, self.audit)

    def look(self, times: int = 2) -> None:
        async def main() -> None:
            for _ in range(times):
                await self.reloader.look()

        asyncio.run(main())

    def is_known(self, name: str) -> bool:
        try:
            self.policies.policy.authenticate(token_of(name))
        except Unauthenticated:
            return False
        return True

    def refused(self) -> set[str]:
        """The settings whose files are not in force, by the metric."""
        return {each.labels[0] for each in self.reloader.samples() if each.value}

    def results(self) -> list[object]:
        lines = audit_lines(self.audit_path)
        assert {line["what"] for line in lines} <= {"ReloadPolicy"}
        return [line["result"] for line in lines]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path)
    yield running
    running.audit.close()


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "servicekit.rpc.reload")
    return caplog


def said(log: pytest.LogCaptureFixture) -> list[tuple[str, Any]]:
    records = [each for each in log.records if each.name == "servicekit.rpc.reload"]
    return [(each.message, each.__dict__["setting"]) for each in records]


def test_nothing_is_said_while_nothing_changes(running: Running, log: Any) -> None:
    running.look(3)
    assert (said(log), running.results(), running.refused()) == ([], [], set())


def test_a_revoked_token_is_not_known_at_the_second_look(running: Running, log: Any) -> None:
    write_policy(running.folder, STAYER)
    running.look(1)
    assert running.is_known("leaver")
    running.look(2)
    assert not running.is_known("leaver")
    assert running.is_known("stayer")
    assert said(log) == [("reloaded", POLICY)]
    assert running.results() == ["ok"]


@pytest.mark.parametrize("text", ["[tokens.x]", "", " \n", "[tokens", "nobody = 1"])
def test_a_bad_policy_changes_nothing_and_is_reported_once(
    running: Running, log: Any, text: str
) -> None:
    write_policy(running.folder, text)
    running.look(5)
    assert running.is_known("leaver")
    assert not running.is_known("stranger")
    assert said(log) == [("not reloaded", POLICY)]
    assert running.results() == ["refused"]
    assert running.refused() == {POLICY}
    write_policy(running.folder, STAYER)
    running.look()
    assert not running.is_known("leaver")
    assert said(log)[1:] == [("reloaded", POLICY)]
    assert running.results() == ["refused", "ok"]
    assert running.refused() == set()


def test_each_new_problem_is_reported(running: Running, log: Any) -> None:
    write_policy(running.folder, "[tokens.x]")
    running.look()
    running.policy_path.unlink()
    running.look(3)
    assert [each.why.partition(":")[0] for each in log.records if each.levelname == "ERROR"] == [
        f"--policy-file {running.policy_path}".partition(":")[0],
        "[Errno 2] No such file or directory",
    ]
    assert running.results() == ["refused", "failed"]
    write_policy(running.folder, STAYER, LEAVER)
    running.look()
    assert said(log)[2:] == [("the files are as before", POLICY)]
    assert running.refused() == set()


def test_what_sighup_has_reported_is_not_reported_again(running: Running, log: Any) -> None:
    write_policy(running.folder, "[tokens.x]")
    asyncio.run(running.reloader.reload())
    running.look(3)
    assert said(log) == [
        ("reloaded", "audit_file"),
        ("not reloaded", POLICY),
        ("reloaded", CERTIFICATES),
    ]
    assert running.results() == ["refused"]


def test_a_certificate_waits_for_its_key(running: Running, log: Any) -> None:
    before = running.certificates.current
    cert, key = running.authority.issue("renewed")
    shutil.copy(cert, running.cert)
    running.look(4)
    assert running.certificates.current is before
    assert said(log) == [("not reloaded", CERTIFICATES)]
    assert running.refused() == {CERTIFICATES}
    shutil.copy(key, running.key)
    running.look()
    found = running.certificates.current
    assert found is not None
    assert (found.chain, found.key) == (cert.read_bytes(), key.read_bytes())
    assert said(log)[1:] == [("reloaded", CERTIFICATES)]
    assert running.results() == []  # of the policy only


def test_certificates_that_change_while_they_are_read_are_not_taken_over(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's ssl reads the files a second time: what gRPC gets is what that has checked."""
    before = running.certificates.current
    old = running.certificates.contents
    for source, target in zip(
        running.authority.issue("renewed"), (running.cert, running.key), strict=True
    ):
        shutil.copy(source, target)
    with pytest.raises(InvalidSetting, match="changed while they were read"):
        running.certificates.take_over(old)
    assert (running.certificates.current, running.certificates.contents) == (before, old)


def test_files_are_read_in_other_threads(running: Running, monkeypatch: Any) -> None:
    read_in: set[str] = set()
    for files in (running.policies, running.certificates):

        def read(read: Any = files.read) -> Any:
            read_in.add(threading.current_thread().name)
            return read()

        monkeypatch.setattr(files, "read", read)
    running.look(1)
    asyncio.run(running.reloader.reload())
    assert read_in
    assert threading.main_thread().name not in read_in


def test_it_goes_on_after_any_error(running: Running, monkeypatch: Any) -> None:
    write_policy(running.folder, STAYER)
    with monkeypatch.context() as patch:
        patch.setattr(running.policies, "_parse", lambda text: 1 / 0)
        running.look(3)
        assert (running.refused(), running.results()) == ({POLICY}, ["failed"])
    running.look(1)
    assert not running.is_known("leaver")
    assert running.results() == ["failed", "ok"]


def test_a_running_service_looks_and_obeys_sighup(running: Running, monkeypatch: Any) -> None:
    """By itself, and at once on SIGHUP; without an interval on SIGHUP only."""

    async def main() -> None:
        settings = running.settings.model_copy(update={"reload_seconds": 0.02})
        async with reloading(settings, running.reloader):
            write_policy(running.folder, STAYER)
            await until_async(lambda: not running.is_known("leaver"))
        monkeypatch.setattr(running.reloader, "look", None)  # to call it is an error
        settings = running.settings.model_copy(update={"reload_seconds": 0.0})
        async with reloading(settings, running.reloader):
            write_policy(running.folder, STAYER, LEAVER)
            os.kill(os.getpid(), signal.SIGHUP)
            await until_async(lambda: running.is_known("leaver"))
        os.kill(os.getpid(), signal.SIGHUP)  # ends nobody
        await asyncio.sleep(0)

    before = signal.getsignal(signal.SIGHUP)
    try:
        asyncio.run(main())
    finally:
        signal.signal(signal.SIGHUP, before)
    assert running.results() == ["ok", "ok"]
