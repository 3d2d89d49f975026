"""The last errors: bounded, newest first, none pushed out by many of another kind, no prompts."""

from __future__ import annotations

from inference_svc.debug.last_errors import MAX_CHARS, PER_KIND, CallEnd, LastErrors
from inference_svc.errors import QueueFull
from servicekit.errors import InvalidArgument


def test_many_of_a_kind_push_out_no_others() -> None:
    errors = LastErrors()
    errors.note(CallEnd.of("LoadAdapter", "NOT_FOUND", InvalidArgument("rare", subject="ref"), "r"))
    for number in range(1000):
        errors.note(CallEnd.of("Generate", "RESOURCE_EXHAUSTED", QueueFull(f"full {number}")))
    errors.note(CallEnd.of("Generate", "OK", None))
    told = errors.describe()
    assert [(row["reason"], row["count"]) for row in told["counts"]] == [
        ("QUEUE_FULL", 1000),
        ("INVALID_ARGUMENT", 1),
    ]
    assert len(told["errors"]) == PER_KIND + 1
    assert told["errors"][0]["message"] == "full 999"
    oldest = told["errors"][-1]
    assert (oldest["method"], oldest["message"], oldest["request_id"]) == (
        "LoadAdapter",
        "rare",
        "r",
    )


def test_a_bug_is_told_by_its_place_and_a_prompt_not_at_all() -> None:
    try:
        raise KeyError("secret prompt")
    except KeyError as error:
        bug = CallEnd.of("Generate", "INTERNAL", error)
    assert bug.reason == "INTERNAL"
    assert bug.message.startswith("KeyError at test_last_errors.py:")
    refused = InvalidArgument("the chat template refuses: secret prompt", subject="chat")
    assert CallEnd.of("Generate", "INVALID_ARGUMENT", refused).message == ""
    long = CallEnd.of("LoadAdapter", "NOT_FOUND", QueueFull("x" * 10_000), "y" * 10_000)
    assert (len(long.message), len(long.request_id)) == (MAX_CHARS, MAX_CHARS)
