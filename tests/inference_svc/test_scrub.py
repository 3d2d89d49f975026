"""No secret stays in text that leaves the server, and what is none stays as it is."""

from __future__ import annotations

import enum
import json
import time

import pytest

import adapter_store.scrub
import inference_svc.scrub

SCRUBS = [inference_svc.scrub.Scrub, adapter_store.scrub.Scrub]
KEY = "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEE\n-----END EC PRIVATE KEY-----"


class Word(enum.Enum):
    ONE = "one"


@pytest.fixture(params=SCRUBS, ids=["inference", "store"])
def make(request: pytest.FixtureRequest):
    return request.param


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
def test_what_looks_like_a_secret_or_is_known_as_one(make, text, left):
    assert make(["zzTOPzz", "no"]).text(text).replace("***!", "***") == left


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
def test_what_is_none_stays(make, text):
    assert make(["no"]).text(text) == text


def test_a_tree_stays_json(make):
    tree = {Word.ONE: [1, 2.5, None, True, ("Bearer abcdef", Word.ONE)], "num_tokens": 5}
    cleaned = make().tree(tree)
    assert json.loads(json.dumps(cleaned)) == {
        "one": [1, 2.5, None, True, ["Bearer ***", "one"]],
        "num_tokens": 5,
    }


def test_what_is_named_as_a_secret_is_hidden_in_a_tree(make):
    tree = {"password": "a b", "token": "", "num_token": 3, "file": {"api_key": "x", "key_id": "y"}}
    assert make().tree(tree) == {
        "password": "***",
        "token": "",
        "num_token": 3,
        "file": {"api_key": "***", "key_id": "y"},
    }


def test_long_text_takes_no_longer_than_its_length(make):
    """Each of these would be slow if a pattern went back over it."""
    for part in ("a+b.", "token   ", "://x", "Bearer ", "-----BEGIN A ", "api_key="):
        start_s = time.monotonic()
        make().text(part * 50_000)
        assert time.monotonic() - start_s < 2.0, part


def test_both_services_have_the_same_one():
    first, second = (__import__(kind.__module__, fromlist=["x"]).__file__ for kind in SCRUBS)
    with open(first) as one, open(second) as other:
        assert one.read() == other.read()
