"""Log lines: fields by name in both formats, no secrets, and no waiting for their reader."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from servicekit.telemetry import logs
from servicekit.telemetry.logs import (
    BackgroundHandler,
    JsonFormatter,
    TextFormatter,
    configure_logging,
    mark_process,
)

NOISY = """
import logging
from servicekit.telemetry.logs import configure_logging
configure_logging("json", "info")
for index in range(20000):
    logging.getLogger("noisy").info("line", extra={"index": index})
"""
FORMATTERS = [JsonFormatter(), TextFormatter()]
SECRETS = {
    "authorization: Bearer s3cr3t-t0ken_x": "s3cr3t-t0ken_x",
    'metadata (("authorization", "bearer s3cr3t"),)': "s3cr3t",
    "postgresql+psycopg://loadout:p\u00e4ss'w\u00f6rd@db/loadout": "p\u00e4ss'w\u00f6rd",
    "token hf_abcdefghijklmnopqrstuvwxyz": "abcdefghijklmnop",
    "https://h/a?X-Amz-Signature=s3cr3t": "s3cr3t",
    "https://s3cr3t@h/a": "s3cr3t",
    "Authorization: Basic s3cr3t": "s3cr3t",
    "aws_secret_access_key=s3cr3t": "s3cr3t",
    '{"password": "s3cr3t"}': "s3cr3t",
    "-----BEGIN PRIVATE KEY-----\ns3cr3t\n-----END PRIVATE KEY-----": "s3cr3t",
}


def record(message: str = "pulled %d", args: object = (3,), **facts: object) -> logging.LogRecord:
    made = logging.LogRecord("service.x", logging.INFO, "f", 1, message, args, None)
    vars(made).update(facts)
    return made


def test_json_lines_carry_fields_by_name() -> None:
    line = json.loads(JsonFormatter().format(record(digest="sha256:1", total_s=0.5)))
    assert line["message"] == "pulled 3"
    assert (line["digest"], line["total_s"], line["level"]) == ("sha256:1", 0.5, "INFO")
    assert line["time"].endswith("+00:00")


def test_text_lines_carry_fields_on_one_line() -> None:
    line = TextFormatter().format(record(digest="sha256:1", request_id='a b\n"c'))
    expected = 'INFO    service.x: pulled 3 digest=sha256:1 request_id="a b\\n\\"c"'
    assert line.endswith(expected)


def test_lines_say_which_process_they_are_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of several processes are in one place."""
    monkeypatch.setattr(logs, "_of_process", {})
    mark_process(rank=1)
    assert TextFormatter().format(record()).endswith(" INFO    service.x: [rank 1] pulled 3")
    assert json.loads(JsonFormatter().format(record()))["rank"] == 1


@pytest.mark.parametrize("formatter", FORMATTERS)
def test_tracebacks_are_kept(formatter: logging.Formatter) -> None:
    failed = record()
    try:
        raise ValueError("seven")
    except ValueError:
        failed.exc_info = sys.exc_info()
    assert "ValueError: seven" in formatter.format(failed)


@pytest.mark.parametrize("formatter", FORMATTERS)
@pytest.mark.parametrize("text", SECRETS)
def test_secrets_are_hidden(formatter: logging.Formatter, text: str) -> None:
    failed = record("%s", (text,), why=text, nested={"deep": [text]})
    try:
        raise ValueError(text)
    except ValueError:
        failed.exc_info = sys.exc_info()
    line = formatter.format(failed)
    if "Json" in type(formatter).__name__:
        line = str(json.loads(line))
    # The traceback shows this file's own source line too, which holds no secret.
    assert SECRETS[text] not in line
    assert "***" in line


@pytest.mark.parametrize("formatter", FORMATTERS)
def test_a_field_named_like_a_secret_is_hidden(formatter: logging.Formatter) -> None:
    line = formatter.format(record(password="a b"))
    assert "a b" not in line
    assert "***" in line


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, restored afterwards."""
    found = logging.getLogger()
    handlers, level = found.handlers[:], found.level
    yield found
    found.handlers[:] = handlers
    found.setLevel(level)


@pytest.mark.parametrize("level", ["warning", "WARNING"])
def test_the_root_logger_gets_format_and_level(root: logging.Logger, level: str) -> None:
    configure_logging("json", level)
    assert [type(handler.formatter) for handler in root.handlers] == [JsonFormatter]
    assert root.level == logging.WARNING


def test_noisy_loggers_log_warnings_only(root: logging.Logger) -> None:
    configure_logging("json", "debug", ["noisy.client"])
    assert logging.getLogger("noisy.client.http").getEffectiveLevel() == logging.WARNING
    assert logging.getLogger("noisy").getEffectiveLevel() == logging.DEBUG


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def _log(handler: logging.Handler, *texts: str) -> None:
    for text in texts:
        handler.handle(logging.makeLogRecord({"msg": text, "levelno": logging.INFO}))


def test_lines_are_complete_and_in_order(pipe: tuple[int, int]) -> None:
    handler = BackgroundHandler(pipe[1])
    _log(handler, *(f"line {index} \udcff" for index in range(50)))
    handler.flush()
    expected = "".join(f"line {index} \\udcff\n" for index in range(50))
    assert os.read(pipe[0], 1 << 16).decode() == expected


def test_a_stalled_reader_delays_no_logging(pipe: tuple[int, int]) -> None:
    handler = BackgroundHandler(pipe[1], max_queued_lines=10)
    start = time.monotonic()
    _log(handler, *("x" * 1000 for _ in range(1000)))
    assert time.monotonic() - start < 5.0
    read = b""
    while b"dropped" not in read:
        read += os.read(pipe[0], 1 << 16)
    handler.flush()
    assert read.count(b"x" * 1000 + b"\n") < 1000
    _log(handler, "after")
    handler.flush()
    assert os.read(pipe[0], 1 << 16).endswith(b"after\n")


@pytest.mark.processes
def test_a_process_ends_without_a_reader() -> None:
    with subprocess.Popen([sys.executable, "-c", NOISY], stderr=subprocess.PIPE) as process:
        assert process.wait(60) == 0
