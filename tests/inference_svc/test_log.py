"""Log lines: facts by name in either form, and no secret in any."""

from __future__ import annotations

import json
import logging
import sys

import pytest

import adapter_store.log
from inference_svc.log import JsonFormatter, TextFormatter, configure_logging

FORMATTERS = [JsonFormatter(), TextFormatter()]
OF_BOTH = [*FORMATTERS, adapter_store.log.JsonFormatter(), adapter_store.log.TextFormatter()]
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
    made = logging.LogRecord("inference_svc.x", logging.INFO, "f", 1, message, args, None)
    vars(made).update(facts)
    return made


def test_json_lines_carry_facts_by_name() -> None:
    line = json.loads(JsonFormatter().format(record(digest="sha256:1", total_s=0.5)))
    assert line["message"] == "pulled 3"
    assert (line["digest"], line["total_s"], line["level"]) == ("sha256:1", 0.5, "INFO")
    assert line["time"].endswith("+00:00")


def test_text_lines_carry_facts_by_name_and_stay_one_line() -> None:
    line = TextFormatter().format(record(digest="sha256:1", request_id='a b\n"c'))
    expected = 'INFO    inference_svc.x: pulled 3 digest=sha256:1 request_id="a b\\n\\"c"'
    assert line.endswith(expected)


@pytest.mark.parametrize("formatter", FORMATTERS)
def test_tracebacks_are_kept(formatter: logging.Formatter) -> None:
    failed = record()
    try:
        raise ValueError("seven")
    except ValueError:
        failed.exc_info = sys.exc_info()
    assert "ValueError: seven" in formatter.format(failed)


@pytest.mark.parametrize("formatter", OF_BOTH)
@pytest.mark.parametrize("text", SECRETS)
def test_secrets_are_blotted_out(formatter: logging.Formatter, text: str) -> None:
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


@pytest.mark.parametrize("formatter", OF_BOTH)
def test_a_fact_that_is_named_as_a_secret_is_hidden(formatter: logging.Formatter) -> None:
    line = formatter.format(record(password="a b"))
    assert "a b" not in line
    assert "***" in line


def test_the_root_logger_gets_the_chosen_form() -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        configure_logging("json", "warning")
        assert [type(handler.formatter) for handler in root.handlers] == [JsonFormatter]
        assert root.level == logging.WARNING
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
