"""Lines of both services go out from a thread of their own: a reader that stops stops nobody."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

import adapter_store.log_writer
import inference_svc.log_writer

HANDLERS = [adapter_store.log_writer.BackgroundHandler, inference_svc.log_writer.BackgroundHandler]

NOISY = """
import logging
from {service}.log import {setup}
{setup}("json", "INFO")
for index in range(20000):
    logging.getLogger("noisy").info("line", extra={{"index": index}})
"""


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def _say(handler: logging.Handler, *texts: str) -> None:
    for text in texts:
        handler.handle(logging.makeLogRecord({"msg": text, "levelno": logging.INFO}))


@pytest.mark.parametrize("handler_type", HANDLERS)
def test_lines_come_whole_and_in_order(
    handler_type: type[inference_svc.log_writer.BackgroundHandler], pipe: tuple[int, int]
) -> None:
    handler = handler_type(pipe[1])
    _say(handler, *(f"line {index} \udcff" for index in range(50)))
    handler.flush()
    expected = "".join(f"line {index} \\udcff\n" for index in range(50))
    assert os.read(pipe[0], 1 << 16).decode() == expected


@pytest.mark.parametrize("handler_type", HANDLERS)
def test_a_reader_that_stops_delays_nobody_and_is_told_what_it_missed(
    handler_type: type[inference_svc.log_writer.BackgroundHandler], pipe: tuple[int, int]
) -> None:
    handler = handler_type(pipe[1], max_waiting_lines=10)
    start = time.monotonic()
    _say(handler, *("x" * 1000 for _ in range(1000)))
    assert time.monotonic() - start < 5.0
    read = b""
    while b"dropped" not in read:
        read += os.read(pipe[0], 1 << 16)
    handler.flush()
    assert read.count(b"x" * 1000 + b"\n") < 1000
    _say(handler, "after")
    handler.flush()
    assert os.read(pipe[0], 1 << 16).endswith(b"after\n")


@pytest.mark.parametrize(
    ("service", "setup"),
    [("adapter_store", "setup_logging"), ("inference_svc", "configure_logging")],
)
def test_a_process_ends_also_when_nobody_reads(service: str, setup: str) -> None:
    code = NOISY.format(service=service, setup=setup)
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as process:
        assert process.wait(30) == 0
