"""Where a run of the tests spent its time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import durations

REPORT = """<?xml version="1.0"?>
<testsuites><testsuite>
<properties><property name="forks tests/system/test_a.py::test_one[x]" value="0.7"/></properties>
<testcase classname="tests.system.test_a" name="test_one[x]" time="2.5"><properties>
  <property name="fixture services" value="1.5"/>
  <property name="setup" value="1.6"/><property name="call" value="0.8"/>
  <property name="processor" value="0.2"/><property name="processor" value="0.1"/>
</properties></testcase>
<testcase classname="tests.adapter_store.api.deep.test_b" name="test_two" time="0.001"/>
</testsuite></testsuites>
"""


@pytest.fixture
def report(tmp_path: Path) -> Path:
    file = tmp_path / "junit.xml"
    file.write_text(REPORT)
    return file


def test_a_report_has_phases_fixtures_and_processor_time(
    report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = durations.read(report)
    assert (one.file, one.seconds) == ("tests/system/test_a.py", 2.5)
    assert one.phases == {"setup": 1.6, "call": 0.8, "teardown": 0.0}
    assert one.fixtures == {"services": 1.5}
    assert one.processor_s == pytest.approx(1.0)
    assert (one.folder, two.folder) == ("tests/system", "tests/adapter_store/api")
    durations.show([one, two], 5)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["tests/system", "2.5", "1.6", "0.8", "0.0", "1.0"] in rows
    assert ["services", "1.5", "1.0"] in rows


def test_a_folder_that_grows_is_named_whatever_the_machine_is() -> None:
    before = {"a": 100.0, "b": 50.0, "c": 80.0, "small": 1.0}
    slower = {name: seconds * 1.5 for name, seconds in before.items()}
    assert durations.speed_of(slower, before) == 1.5
    assert durations.grown(slower, before, 1.5) == []
    found = durations.grown(slower | {"b": 100.0, "small": 3.0, "new": 40.0}, before, 1.5)
    assert found == ["b: 100 s, of 75", "new: 40 s, of 0"]


def test_the_table_is_written_and_read(tmp_path: Path) -> None:
    table = tmp_path / "durations.toml"
    durations.write_table({"tests/b": 12.6, "tests/a": 0.2}, table)
    assert durations.load_table(table.read_text()) == {"tests/a": 0, "tests/b": 13}


@pytest.mark.processes
def test_commits_name_what_grows() -> None:
    assert list(durations.unnamed_growth()) == []
