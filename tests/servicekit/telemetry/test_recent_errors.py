"""Recent errors: bounded, newest first, none displaced by another kind, no private data."""

from __future__ import annotations

import pytest

from servicekit.errors import InvalidArgument, ResourceExhausted
from servicekit.telemetry.recent_errors import MAX_CHARS, MAX_PER_KIND, CallEnd, RecentErrors


def test_many_of_a_kind_displace_no_others() -> None:
    errors = RecentErrors()
    rare = InvalidArgument("rare", subject="ref")
    errors.add(CallEnd.of("LoadAdapter", "INVALID_ARGUMENT", rare, {"request_id": "r"}))
    for number in range(1000):
        full = ResourceExhausted(f"full {number}")
        errors.add(CallEnd.of("Generate", "RESOURCE_EXHAUSTED", full, {}))
    errors.add(CallEnd.of("Generate", "OK", None, {}))
    found = errors.describe()
    assert [(row["reason"], row["count"]) for row in found["counts"]] == [
        ("RESOURCE_EXHAUSTED", 1000),
        ("INVALID_ARGUMENT", 1),
    ]
    assert len(found["errors"]) == MAX_PER_KIND + 1
    assert found["errors"][0]["message"] == "full 999"
    oldest = found["errors"][-1]
    assert oldest.pop("time")
    assert oldest == {
        "method": "LoadAdapter",
        "code": "INVALID_ARGUMENT",
        "reason": "INVALID_ARGUMENT",
        "message": "rare",
        "request_id": "r",
    }


def test_bugs_are_described_by_their_place() -> None:
    try:
        raise KeyError("secret prompt")
    except KeyError as error:
        bug = CallEnd.of("Generate", "INTERNAL", error, {})
    assert bug.reason == "INTERNAL"
    assert bug.message.startswith("KeyError at test_recent_errors.py:")


@pytest.mark.parametrize("subject", ["chat", "chat[3].role"])
def test_messages_about_private_subjects_are_left_out(subject: str) -> None:
    refused = InvalidArgument("the chat template refuses: secret prompt", subject=subject)
    end = CallEnd.of("Generate", "INVALID_ARGUMENT", refused, {}, private_subjects=("chat",))
    assert (end.reason, end.message) == ("INVALID_ARGUMENT", "")


def test_long_texts_are_cut() -> None:
    error = ResourceExhausted("x" * 10_000)
    long = CallEnd.of("Load", "NOT_FOUND", error, {"adapter": "z" * 10_000})
    assert len(long.message) == MAX_CHARS
    errors = RecentErrors()
    errors.add(long)
    assert len(errors.describe()["errors"][0]["adapter"]) == MAX_CHARS
