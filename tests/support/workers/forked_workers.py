"""Runs tests in several processes that are forked once all tests are collected.

Each worker of pytest-xdist imports and collects all tests anew, ten seconds of a core and more, and
sends five messages for each test. These workers have what their parent has collected, and send one.
The parent has no threads when it forks. A worker ends as a Python program does: it waits for its
threads and calls its own exit handlers.
"""

from __future__ import annotations

import atexit
import io
import itertools
import os
import threading
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest
from _pytest._io import TerminalWriter
from _pytest.junitxml import xml_key

OPTION = "--forked-workers"
Files = list[list[pytest.Item]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=int, default=0, help="processes that tests run in, forked")


def pytest_configure(config: pytest.Config) -> None:
    if workers := config.getoption(OPTION):
        config.pluginmanager.register(ForkedWorkers(workers), "forked-workers")


class ForkedWorkers:
    """A plugin that runs the tests in place of pytest's own loop. A file's run in one process."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest's own loop knows what to do
        # Made now, it is one folder for all, which this process removes.
        session.config._tmp_path_factory.getbasetemp()
        run = Run(session, files_of(session.items))
        workers = [Worker(run) for _ in range(self._workers)]
        while workers:
            for worker in wait(workers):
                assert isinstance(worker, Worker)
                if not worker.hear():
                    workers.remove(worker)
        run.fail(run.left(), "not run: all workers have ended")
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        return True


def files_of(items: Sequence[pytest.Item]) -> Files:
    """The tests of each file. Files that start processes come first, and then those with the most
    tests: the last to end are short then."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    return sorted(files.values(), key=_weight, reverse=True)


def _weight(items: Sequence[pytest.Item]) -> tuple[bool, int]:
    return _starts_processes(items), len(items)


def _starts_processes(items: Sequence[pytest.Item]) -> bool:
    return any(each.get_closest_marker("processes") for each in items)


class Run:
    """The files that no worker has, and the reports of all workers."""

    def __init__(self, session: pytest.Session, files: Files) -> None:
        self.session = session
        self.files = files
        self._next = 0

    def take(self) -> int | None:
        """The index of the next file. None if there is no other, or enough tests have failed."""
        if self._next == len(self.files) or self.session.shouldfail or self.session.shouldstop:
            return None
        self._next += 1
        return self._next - 1

    def left(self) -> list[pytest.Item]:
        """The tests of all files that may be taken and were not."""
        items = []
        while (index := self.take()) is not None:
            items += self.files[index]
        return items

    def report(self, reports: Sequence[dict[str, Any]]) -> None:
        """Has pytest count and show the reports of one test."""
        config = self.session.config
        for each in reports:
            report = config.hook.pytest_report_from_serializable(config=config, data=each)
            config.hook.pytest_runtest_logreport(report=report)
        nodeid, location = reports[-1]["nodeid"], reports[-1]["location"]
        config.hook.pytest_runtest_logfinish(nodeid=nodeid, location=location)

    def fail(self, items: Sequence[pytest.Item], why: str) -> None:
        """Has tests fail that have no reports."""
        for item in items:
            report = pytest.TestReport(
                item.nodeid, item.location, {}, "failed", f"{item.nodeid}: {why}", "call"
            )
            self.session.config.hook.pytest_runtest_logreport(report=report)


class Worker:
    """A forked process, as its parent sees it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._connection, connection = Pipe()
        self._outstanding: dict[str, pytest.Item] = {}
        self._pid = os.fork()
        if self._pid == 0:
            self._connection.close()
            _work(run.session, run.files, connection)
        connection.close()

    def fileno(self) -> int:
        """For `wait`."""
        return self._connection.fileno()

    def hear(self) -> bool:
        """Handles one message: None asks for a file, and else it is a test's reports. Returns False
        when the worker has ended, and has the tests fail that it has not reported."""
        try:
            reports = self._connection.recv()
        except (EOFError, ConnectionResetError):
            status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            why = f"the worker that had this test ended before, with the status {status}"
            self._run.fail([*self._outstanding.values()], why)
            return False
        if reports is None:
            index = self._run.take()
            self._outstanding |= (
                {each.nodeid: each for each in self._run.files[index]} if index is not None else {}
            )
            self._connection.send(index)
        else:
            del self._outstanding[reports[-1]["nodeid"]]
            self._run.report(reports)
        return True


def _work(session: pytest.Session, files: Files, connection: Connection) -> None:
    """The life of a worker's process; never returns."""
    status = 1
    atexit._clear()  # of its parent
    try:
        _report_to(connection, session.config)
        for item, following in itertools.pairwise(_items(files, connection)):
            if item is not None:
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _items(files: Files, connection: Connection) -> Iterator[pytest.Item | None]:
    """Yields tests, and None where fixtures of the session end: at the end, and after the last
    file that starts processes, so that no server of theirs outlives it. Each file is asked for
    before the last test of the one before runs."""
    started = False
    while True:
        connection.send(None)
        index = connection.recv()
        if index is None:
            yield None
            return
        starts = _starts_processes(files[index])
        if started and not starts:
            yield None
        started = starts
        yield from files[index]


def _report_to(connection: Connection, config: pytest.Config) -> None:
    """Has this process write to nothing that it shares with its parent."""
    capture = config.pluginmanager.get_plugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    for plugin in filter(None, (terminal, config.stash.get(xml_key, None))):
        config.pluginmanager.unregister(plugin)
    config.pluginmanager.register(Silence(), "terminalreporter")
    config.pluginmanager.register(Reports(connection, config))


class Silence:
    """Stands in for the plugin that writes to the terminal: pytest-timeout asks for its writer, and
    other plugins write lines."""

    def __init__(self) -> None:
        self._tw = TerminalWriter(io.StringIO())

    def write_line(self, line: str) -> None:
        pass

    def flush(self) -> None:
        pass


class Reports:
    """A worker's plugin, which sends the reports of each test together."""

    def __init__(self, connection: Connection, config: pytest.Config) -> None:
        self._connection = connection
        self._config = config
        self._reports: list[dict[str, Any]] = []
        # Only these read of phases that have passed and said nothing.
        options = config.option
        self._sends_all = options.durations is not None or getattr(options, "xmlpath", None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call" and not report.sections and not self._sends_all:
            return
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        self._reports.append(data)

    def pytest_runtest_logfinish(self) -> None:
        self._connection.send(self._reports)
        self._reports = []
