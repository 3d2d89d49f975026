from __future__ import annotations

import json
import logging
import sys

import pytest

from adapter_store.log import JsonFormatter, TextFormatter, setup_logging


def record(message: str = "pulled %d", args: object = (3,), **facts: object) -> logging.LogRecord:
    made = logging.LogRecord("adapter_store.x", logging.INFO, "f", 1, message, args, None)
    vars(made).update(facts)
    return made


def test_json_lines_carry_facts_by_name():
    line = json.loads(JsonFormatter().format(record(digest="sha256:1", bytes=5)))
    assert line["message"] == "pulled 3"
    assert (line["digest"], line["bytes"], line["level"]) == ("sha256:1", 5, "INFO")
    assert line["time"].endswith("+00:00")


def test_text_lines_carry_facts_by_name():
    line = TextFormatter().format(record(digest="sha256:1"))
    assert line.endswith("INFO    adapter_store.x: pulled 3 digest=sha256:1")


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_tracebacks_are_kept(formatter):
    failed = record()
    try:
        raise ValueError("seven")
    except ValueError:
        failed.exc_info = sys.exc_info()
    assert "ValueError: seven" in formatter.format(failed)


def test_what_clients_log_about_requests_stays_out():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        setup_logging("json", "DEBUG")
        for name in ("botocore.auth", "urllib3.connectionpool", "httpx2", "httpcore2.http11"):
            assert logging.getLogger(name).getEffectiveLevel() == logging.WARNING
        assert [type(handler.formatter) for handler in root.handlers] == [JsonFormatter]
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
