"""The device that the tests run on: a GPU, or the CPU through Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext

import numpy as np
import pytest
import torch

from kernels import tuning
from kernels.dispatch import interpreted
from tests.support.kernels.worker import teach_the_interpreter_ranges

IS_EMULATED = os.environ.get("TRITON_INTERPRET") == "1"

if not IS_EMULATED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "smoke: the smallest of its kind, for every run")
    config.addinivalue_line(
        "markers", "real: not for the interpreter, whose bf16 products are wrong"
    )
    config.pluginmanager.register(Failures(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if IS_EMULATED:
        items[:] = [item for item in items if item.get_closest_marker("real") is None]


class Failures:
    """Prints each failure of these tests at once: a run that is stopped would show none."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid.startswith("tests/gpu/"):
            terminal = self._config.pluginmanager.getplugin("terminalreporter")
            terminal.write_line(f"\nFAILED {report.nodeid}, {report.when}\n{report.longreprtext}")
            terminal.flush()


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> None:
    torch.set_num_threads(1)
    if IS_EMULATED:
        teach_the_interpreter_ranges()
    else:
        tuning.use_device(torch.cuda.get_device_name())


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if IS_EMULATED else "cuda")


@pytest.fixture
def on_device() -> Callable[[], AbstractContextManager[None]]:
    """While `on_device()` lasts, Triton computes; on the CPU otherwise torch does."""
    return interpreted if IS_EMULATED else nullcontext


@pytest.fixture(autouse=True)
def _emulation() -> Iterator[None]:
    """Few programs, which run one after the other, and few iterations: prompts in chunks, in fp32,
    too. And what a kernel masks, such as the logarithm of 0, makes numpy warn."""
    with ExitStack() as stack:
        if IS_EMULATED:
            stack.enter_context(tuning.overridden("decode", programs=16))
            stack.enter_context(tuning.overridden("delta_chunks", chunk=16))
        stack.enter_context(np.errstate(all="ignore"))
        yield
