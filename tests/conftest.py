"""What holds for every test."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

# Or gRPC tells of connections that end, at any time, where tests read what commands print.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from tests.support import pairs
from tests.support.durations import Durations
from tests.support.workers import forked_workers, late_grammars, processes, root_logs, share

PROCESS_FIXTURES = {"postgres", "catalog_dsn", "s3_endpoint", "interpreter", "compiler"}
"""Fixtures that start processes: a test that requests one bears the mark `processes` by that."""
PROCESS_FOLDERS = ("tests/system/", "tests/soak/", "tests/loadout/demo/", "tests/gpu/")
"""On a GPU Triton starts an assembler."""
ARTIFACT_FIXTURES = {"compiler", "interpreter"}
ARTIFACT_FILES = (
    *("tests/kernels/test_sass.py", "tests/tools/test_wheel.py", "tests/docs/test_site.py"),
    *("tests/docs/test_sizing_docs.py", "tests/test_gpu_emulated.py"),
    *("tests/bench/test_gpu_run.py", "tests/kernels/test_triton_launchers.py"),
    *("tests/inference_svc/engine/test_memory_fit.py", "tests/system/test_emulated_device.py"),
    "tests/bench/test_gpu_cost.py",
)
"""Tests that build something, compile or interpret kernels of devices, or compute large tables
anew, bear the mark `artifacts`."""
SOURCE_FILES = ("tests/test_house.py", "tests/test_layering.py", "tests/docs/test_words.py")
"""Tests that read the source and run little of it; they bear the mark `source`."""
LEFT_OUT = {
    "not processes": PROCESS_FOLDERS,
    "not artifacts": ARTIFACT_FILES,
    "not source": SOURCE_FILES,
    "not containers": ("tests/containers/",),
    "not trl": ("tests/trl/",),
}
"""Folders and files that hold no test but of one mark, by the words of `-m` that leave it out."""


with suppress(ImportError):  # tests/gpu also runs where they are not installed
    from tests.support import examples
    from tests.support.workers import remembered

    examples.install()
    remembered.install()


def pytest_addoption(parser: pytest.Parser) -> None:
    forked_workers.pytest_addoption(parser)


def pytest_configure(config: pytest.Config) -> None:
    processes.install()
    late_grammars.install()
    root_logs.install()
    forked_workers.pytest_configure(config)
    if config.getoption(forked_workers.OPTION):
        # A fork has none of OpenMP's threads, and would wait for them.
        importlib.import_module("torch").set_num_threads(1)
    config.pluginmanager.register(Durations(), "durations")
    has_workers = config.getoption("numprocesses", None) or config.getoption(forked_workers.OPTION)
    if has_workers and not hasattr(config, "workerinput"):
        config.pluginmanager.register(share.RunShare(), "share")
    # Until all is imported: nothing of it is garbage, and looking for some is half of the time.
    gc.disable()
    # A job in the background ignores SIGINT, and so would the processes that tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names the native kernels that no test could run, which are skipped one by one."""
    with suppress(ImportError):  # tests/gpu also runs where they are not installed
        native = importlib.import_module("tests.support.native")
        missing = [each for each in native.build.FLAGS if each not in native.variants_here()]
        if missing:
            terminalreporter.write_line(
                f"Not tested, because this machine does not run them: {', '.join(missing)}"
            )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Folders and files of which no test is to run are not even read."""
    marks = config.getoption("markexpr")
    name = f"{collection_path.relative_to(config.rootpath)}/"
    return any(words in marks and name.startswith(LEFT_OUT[words]) for words in LEFT_OUT) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests, and begins with those that wait for processes: the others fill up what is left
    of the workers' time, file by file."""
    items.sort(key=lambda item: not item.nodeid.startswith(PROCESS_FOLDERS))
    for item in items:
        fixtures = {*getattr(item, "fixturenames", ())}
        starts = item.nodeid.startswith(PROCESS_FOLDERS) or "postgres" in item.nodeid
        if starts or not PROCESS_FIXTURES.isdisjoint(fixtures):
            item.add_marker(pytest.mark.processes)
        if item.nodeid.startswith(ARTIFACT_FILES) or not ARTIFACT_FIXTURES.isdisjoint(fixtures):
            item.add_marker(pytest.mark.artifacts)
        if item.nodeid.startswith(SOURCE_FILES):
            item.add_marker(pytest.mark.source)
    pairs.thin(items)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    # Looked for at each 700 new objects, garbage takes a sixteenth of the time, at each 7,000 a
    # thirtieth.
    gc.set_threshold(50_000)
    compute_with_one_thread()


def compute_with_one_thread() -> None:
    """A worker has one core, and OpenMP's threads spin while they wait for each other: beside a
    busy core two took six times the processor's time of one. Tests of several threads ask for
    them."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    return (yield from processes.hold(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    return (yield from processes.hold(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """An engine that a file has built in this process has set its own number of threads."""
    yield
    if nextitem is None or nextitem.path != item.path:
        compute_with_one_thread()
