"""Secrets are hidden in text that leaves the server; all else stays as it is."""

from __future__ import annotations

import enum
import json
import time

import pytest

from servicekit.telemetry.redact import Redactor

KEY = "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEE\n-----END EC PRIVATE KEY-----"


class Color(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("cannot reach https://me:hunter22@host/x", "cannot reach https://***@host/x"),
        ("postgresql+psycopg://u:p%40ss@db/catalog", "postgresql+psycopg://***@db/catalog"),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: Basic ***"),
        ("sent Bearer abc.def-123", "sent Bearer ***"),
        ("GET /a?X-Amz-Signature=0123abcd&x=1", "GET /a?X-Amz-Signature=***&x=1"),
        ("aws_secret_access_key = wJalrXUtn", "aws_secret_access_key = ***"),
        ("password: hunter22, next", "password: ***, next"),
        (f"read {KEY} here", "read *** here"),
        ("https://TOKEN@h/a and http://p@ss@h", "https://***@h/a and http://***@h"),
        ("?se=2026&sig=0123abcd&x=1", "?se=2026&sig=***&x=1"),
        ("of hf_abcdefghijklmnopqrstuvwxyz", "of hf_***"),
        ("3 tokens, token_s, TOKEN=abcdef", "3 tokens, token_s, TOKEN=***"),
        ("the known one: zzTOPzz!", "the known one: ***"),
    ],
)
def test_secrets_are_hidden(text, left):
    assert Redactor(["zzTOPzz", "no"]).redact(text).replace("***!", "***") == left


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens: must be at least 1",
        "authorization: this token is not known",
        "no adapter default/french@2",
        "stop_token_ids: 7 is no token",
        "file:///srv/adapters/a",
        "s3://bucket/prefix?versionId=7",
        "first_token_s=0.25 completion_tokens=64 design=abcdef",
    ],
)
def test_other_text_is_unchanged(text):
    assert Redactor(["no"]).redact(text) == text


def test_a_tree_stays_json():
    tree = {Color.RED: [1, 2.5, None, True, ("Bearer abcdef", Color.RED)], "num_tokens": 5}
    cleaned = Redactor().redact_tree(tree)
    assert json.loads(json.dumps(cleaned)) == {
        "red": [1, 2.5, None, True, ["Bearer ***", "red"]],
        "num_tokens": 5,
    }


def test_fields_named_like_secrets_are_hidden():
    tree = {"password": "a b", "token": "", "num_token": 3, "file": {"api_key": "x", "key_id": "y"}}
    assert Redactor().redact_tree(tree) == {
        "password": "***",
        "token": "",
        "num_token": 3,
        "file": {"api_key": "***", "key_id": "y"},
    }


@pytest.mark.slow
def test_long_text_takes_linear_time():
    """Each of these would be slow if a pattern went back over it."""
    for part in ("a+b.", "token   ", "://x", "Bearer ", "-----BEGIN A ", "api_key="):
        start_s = time.thread_time()
        Redactor().redact(part * 50_000)
        assert time.thread_time() - start_s < 2.0, part
