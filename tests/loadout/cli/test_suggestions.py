"""What is suggested for an adapter that is not there, against scripted servers."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb


@pytest.fixture
def missing(fail):
    """missing(ref): the answer that there is no such adapter."""

    def build(ref: str):
        code = grpc.StatusCode.NOT_FOUND
        return fail(code, "NOT_FOUND", ref, message=f"no adapter {ref}")

    return build


def names(*known: str):
    def answer(request, context):
        prefix = request.filter.partition(" name=")[2]
        adapters = [store_pb.Adapter(name=f"acme/{each}") for each in known]
        found = [each for each in adapters if each.name.startswith(f"acme/{prefix}")]
        return store_pb.ListAdaptersResponse(adapters=found)

    return answer


@pytest.mark.parametrize("typed", ["frnch", "fench", "frenche"])
def test_close_name_of_the_same_tenant(run, fake_store, missing, typed):
    fake_store.on("DeleteAdapter", missing(f"acme/{typed}"))
    fake_store.on("ListAdapters", names("french", "frisian", "german"))
    code, out, err = run("delete", f"acme/{typed}")
    assert (code, out) == (1, "")
    assert err == f"loadout: no adapter acme/{typed}; did you mean acme/french? (NOT_FOUND)\n"
    requests = fake_store.requests["ListAdapters"]
    assert {each.filter.split()[0] for each in requests} == {"tenant=acme"}
    assert {each.page_size for each in requests} == {100}


def test_adapter_of_a_generation(run, fake_store, fake_inference, missing):
    fake_inference.on("Generate", missing("acme/frnch"))
    fake_store.on("ListAdapters", names("french"))
    err = run("generate", "--adapter", "acme/frnch", "x")[2]
    assert err == "loadout: no adapter acme/frnch; did you mean acme/french? (NOT_FOUND)\n"


@pytest.mark.parametrize("command", [("generate", "x", "--adapter"), ("pin",)])
def test_store_that_nobody_named_is_not_asked(run, fake_inference, missing, monkeypatch, command):
    """It would get the token."""
    asked = []
    monkeypatch.delenv("LOADOUT_STORE")
    monkeypatch.setattr("loadout.cli.connection.suggest", lambda *call: asked.append(call))
    for method in ("Generate", "PinAdapter"):
        fake_inference.on(method, missing("acme/frnch"))
    err = run(*command, "acme/frnch")[2]
    assert err == "loadout: no adapter acme/frnch (NOT_FOUND)\n"
    assert asked == []


def test_versions_that_there_are(run, fake_store, missing):
    adapters = [store_pb.Adapter(name="acme/french", version=each) for each in (5, 3, 2, 1)]
    adapters[1].delete_time.CopyFrom(Timestamp(seconds=1))
    fake_store.on("DeleteAdapter", missing("acme/french@9"))
    fake_store.on("ListVersions", store_pb.ListVersionsResponse(adapters=adapters))
    err = run("delete", "acme/french", "--version", "9")[2]
    assert err == "loadout: no adapter acme/french@9; there are versions 1-2, 5 (NOT_FOUND)\n"
    fake_store.on(
        "ListVersions", store_pb.ListVersionsResponse(adapters=adapters, next_page_token="more")
    )
    err = run("delete", "acme/french", "--version", "9")[2]
    assert err.endswith("; the newest are versions 1-2, 5 (NOT_FOUND)\n")


def test_version_of_a_name_that_is_not_there(run, fake_store, missing):
    fake_store.on("DeleteAdapter", missing("acme/frnch@9"))
    fake_store.on("ListVersions", missing("acme/frnch"))
    fake_store.on("ListAdapters", names("french"))
    assert run("delete", "acme/frnch", "--version", "9")[2].endswith(
        "did you mean acme/french? (NOT_FOUND)\n"
    )


@pytest.mark.parametrize("ref", ["acme/frnch", "sha256:" + "0" * 64])
def test_nothing_close_changes_no_message(run, fake_store, missing, ref):
    """Nor does a tenant that the caller may not read: it has no names then."""
    fake_store.on("DeleteAdapter", missing(ref))
    fake_store.on("ListAdapters", names())
    assert run("delete", "acme/frnch") == (1, "", f"loadout: no adapter {ref} (NOT_FOUND)\n")


def test_store_that_does_not_list_changes_no_message(run, fake_store, missing, fail):
    fake_store.on("DeleteAdapter", missing("acme/frnch"))
    fake_store.on("ListAdapters", fail(grpc.StatusCode.PERMISSION_DENIED, "X", "tenant"))
    assert run("delete", "acme/frnch") == (1, "", "loadout: no adapter acme/frnch (NOT_FOUND)\n")
