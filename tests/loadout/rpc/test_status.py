"""Every status code has an error, and details are read or ignored, never trusted to parse."""

from __future__ import annotations

import pickle

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from loadout import errors
from loadout._rpc import status

FAILURES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]


@pytest.mark.parametrize("code", FAILURES, ids=lambda code: code.name)
def test_every_code_from_a_service(code, fail, client, fake_store):
    fake_store.on("GetAdapter", fail(code, "REASON", "field", message="what happened"))
    with pytest.raises(errors.LoadoutError) as caught:
        client.get("a")
    error = caught.value
    assert type(error) is status.ERROR_OF_CODE[code]
    assert (error.code, error.reason, error.subject) == (code.name, "REASON", "field")
    assert str(error) == "what happened"


@pytest.mark.parametrize("code", sorted(status.LOST_CODES, key=str), ids=lambda code: code.name)
def test_three_faces_of_a_lost_stream(code, fail, client, fake_inference):
    fake_inference.on("UnloadAdapter", fail(code))
    with pytest.raises(errors.StreamLost) as caught:
        client.unload("a")
    assert caught.value.code == code.name
    assert len(fake_inference.requests["UnloadAdapter"]) == 1


def test_table_is_complete():
    assert set(status.ERROR_OF_CODE) == set(FAILURES)


def test_retry_info(fail, client, fake_store):
    refusal = fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after_s=3600.5)
    fake_store.on("GetAdapter", refusal)
    with pytest.raises(errors.ResourceExhausted) as caught:
        client.get("a")
    assert caught.value.retry_after_s == pytest.approx(3600.5)


def test_subject_from_error_info():
    info = error_details_pb2.ErrorInfo(reason="R", metadata={"subject": "lora_A"})
    box = any_pb2.Any()
    box.Pack(info)
    blob = status_pb2.Status(details=[box]).SerializeToString()
    assert status.read_details([(status.DETAILS_KEY, blob)]) == status.Details(
        "R", "lora_A", from_service=True
    )


@pytest.mark.parametrize("blob", [b"\xff\xff\xff", b"\x1a\x09"], ids=repr)
def test_garbage_details_count_as_absent(blob):
    assert status.read_details([("x", "y"), (status.DETAILS_KEY, blob)]) == status.Details()


def test_a_service_may_answer_without_a_reason():
    """The services' fixed text for their own faults: not a lost stream, not worth a second try."""
    blob = status_pb2.Status(code=13, message="internal error").SerializeToString()
    assert status.read_details([(status.DETAILS_KEY, blob)]) == status.Details(from_service=True)


def test_errors_pickle():
    error = errors.NotFound("m", code="NOT_FOUND", reason="R", subject="s", retry_after_s=1.0)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is errors.NotFound
    assert (again.message, again.code, again.reason) == ("m", "NOT_FOUND", "R")
    assert (again.subject, again.retry_after_s) == ("s", 1.0)


def test_each_kind_of_error_says_what_has_happened():
    texts = [kind.__dict__["__doc__"] for kind in errors.LoadoutError.__subclasses__()]
    assert all(texts)
    assert len(set(texts)) == len(texts)
