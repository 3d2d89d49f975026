"""One line for each call that ends: what it was about, and nothing that is secret."""

from __future__ import annotations

import io
import json

import pytest

from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from tests.support.access.policies import token_lines, token_of, write_policy
from tests.support.logs import captured_log

pytestmark = pytest.mark.slow


@pytest.fixture
def log():
    with captured_log() as written:
        yield written


def call_lines(log: io.StringIO) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    return [line for line in lines if str(line["message"]).startswith("call ")]


def lines_of(log: io.StringIO, method: str) -> list[dict[str, object]]:
    return [line for line in call_lines(log) if line["method"] == method]


def test_lines_have_caller_request_and_result(
    serve, log, make_adapter, make_layout, refused, tmp_path
):
    policy = write_policy(
        tmp_path, token_lines("trainer", ["publisher"]), token_lines("engine", ["server"])
    )
    store = serve(policy_file=policy)
    trainer, engine = (store.connect(token_of(name)) for name in ("trainer", "engine"))
    digest = trainer.register("french", make_adapter()).adapter.digest
    layout_id = engine.register_layout(make_layout())
    engine.pull(digest, layout_id)
    with refused("NOT_FOUND"):
        engine.get("gone")
    with refused("UNAUTHENTICATED"):
        store.connect("another-token").get("french")
    with refused("PERMISSION_DENIED"):
        engine.register("mine", tmp_path)
    store.stop()

    [line] = lines_of(log, "PullAdapter")
    assert (line["who"], line["tenant"], line["code"]) == ("engine", "team-a", "OK")
    assert (line["digest"], line["layout_id"]) == (digest, layout_id)
    assert line["seconds"] >= 0
    registered, denied = lines_of(log, "RegisterAdapter")
    assert (registered["adapter"], registered["digest"]) == ("team-a/french", digest)
    assert (denied["reason"], denied["who"]) == ("PERMISSION_DENIED", "engine")
    gone, unknown = lines_of(log, "GetAdapter")
    assert (gone["adapter"], gone["reason"], gone["level"]) == ("gone", "NOT_FOUND", "INFO")
    assert (unknown["code"], unknown["reason"]) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
    [layout] = lines_of(log, "RegisterLayout")
    assert (layout["layout_id"], layout["base_model"]) == (layout_id, make_layout().base_model)
    for name in ("trainer", "engine"):
        assert token_of(name) not in log.getvalue()
    assert "another-token" not in log.getvalue()


def test_a_caller_may_name_its_call(store, client, log):
    request = pb.GetStoreStatusRequest()
    client.stub.GetStoreStatus(request, metadata=[("x-request-id", "of-the-gateway")])
    client.stub.GetStoreStatus(request)
    store.stop()
    first, second = lines_of(log, "GetStoreStatus")
    assert first["request_id"] == "of-the-gateway"
    assert len(str(second["request_id"])) == 32
    assert first["level"] == "DEBUG", "asked for often, and nothing to worry about"


def test_long_words_are_cut(store, client, log, refused):
    with refused("INVALID_ARGUMENT"):
        client.get("x" * 50_000)
    store.stop()
    [line] = lines_of(log, "GetAdapter")
    assert line["adapter"] == "x" * 256
    assert len(json.dumps(line)) < 2000
