"""Access as an operator runs it: a real process, its policy file, SIGHUP, audit and logs."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

import grpc
import pytest

from adapter_store.__main__ import _run as run_process
from adapter_store.config import StoreSettings
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from tests.support.access.policies import ROOT, audit_lines, token_lines, token_of, write_policy
from tests.support.store.adapters import tiny_layout
from tests.support.wait import until

pytestmark = pytest.mark.slow


def code_of(action: Callable[[], object]) -> str:
    try:
        action()
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


@pytest.mark.processes
def test_sighup_reads_the_policy_and_opens_the_audit_file_anew(
    spawn, connect, make_adapter, tmp_path
):
    folder = make_adapter()
    audit = tmp_path / "audit.jsonl"
    policy = write_policy(
        tmp_path,
        ROOT,
        token_lines("leaver", ["reader"]),
        token_lines("mover", ["reader"]),
        token_lines("stayer", ["reader"]),
    )
    files = ("--policy-file", str(policy), "--audit-file", str(audit))
    process = spawn(*files, "--reload-seconds", "0")
    address = process.wait_until_ready()["grpc"]
    clients = {
        name: connect(address, token_of(name))
        for name in ("root", "leaver", "mover", "stayer", "joiner")
    }
    clients["root"].register("team-a/a", folder)
    watches = {
        name: clients[name].stub.WatchAdapters(pb.WatchAdaptersRequest(since_revision=1))
        for name in ("leaver", "mover", "stayer")
    }
    for watch in watches.values():
        assert next(watch).event.kind == pb.EVENT_KIND_BOOKMARK
    assert code_of(lambda: clients["joiner"].get("a")) == "UNAUTHENTICATED"

    def reload(*parts: str) -> dict[str, object]:
        num_before = len(audit_lines(audit)) if audit.exists() else 0
        write_policy(tmp_path, *parts)
        process.signal(signal.SIGHUP)
        until(lambda: audit.exists() and len(audit_lines(audit)) > num_before)
        return audit_lines(audit)[-1]

    # A bad file changes nothing.
    line = reload("[tokens.x]")
    assert (line["what"], line["result"]) == ("ReloadPolicy", "refused")
    assert line["reason"] == "POLICY_INVALID"
    assert code_of(lambda: clients["leaver"].get("a")) == "OK"
    # A good one does, for calls and for the watches under way; the audit file has been moved away.
    audit.rename(tmp_path / "audit.1")
    line = reload(
        ROOT,
        token_lines("mover", ["reader"], ["team-a", "team-b"]),
        token_lines("stayer", ["reader", "publisher"]),
        token_lines("joiner", ["reader"]),
    )
    assert (line["what"], line["result"]) == ("ReloadPolicy", "ok")
    assert code_of(lambda: clients["joiner"].get("a")) == "OK"
    assert code_of(lambda: clients["leaver"].get("a")) == "UNAUTHENTICATED"
    assert code_of(lambda: list(watches["leaver"])) == "UNAUTHENTICATED"
    assert code_of(lambda: list(watches["mover"])) == "OUT_OF_RANGE"  # list again
    clients["stayer"].register("b", folder)
    while (event := next(watches["stayer"]).event).kind == pb.EVENT_KIND_BOOKMARK:
        pass
    assert event.name == "team-a/b"
    watches["stayer"].cancel()
    assert [each["what"] for each in audit_lines(audit)] == ["ReloadPolicy", "RegisterAdapter"]
    assert process.end(signal.SIGTERM)[0] == 0


@pytest.mark.processes
def test_every_requested_change_has_a_line(spawn, connect, make_adapter, tmp_path):
    folder = make_adapter()
    audit = tmp_path / "audit.jsonl"
    policy = write_policy(tmp_path, ROOT, token_lines("a", ["publisher"]))
    process = spawn("--policy-file", str(policy), "--audit-file", str(audit))
    address = process.wait_until_ready()["grpc"]
    root, publisher = connect(address, token_of("root")), connect(address, token_of("a"))
    made = publisher.register("one", folder)
    publisher.upload("two", {path.name: path.read_bytes() for path in folder.iterdir()})
    root.stub.PinAdapter(pb.PinAdapterRequest(ref="team-a/one"))
    root.stub.UnpinAdapter(pb.UnpinAdapterRequest(ref="team-a/one"))
    publisher.stub.DeleteAdapter(pb.DeleteAdapterRequest(name="one", version=1))
    publisher.stub.RollbackAdapter(pb.RollbackAdapterRequest(name="one", version=1))
    layout_id = root.register_layout(tiny_layout())
    publisher.register("one", make_adapter(folder="new", seed=1), keep=1)
    publisher.stub.PruneVersions(pb.PruneVersionsRequest(name="one", keep=1))
    assert code_of(lambda: publisher.register("team-b/x", folder)) == "PERMISSION_DENIED"
    assert code_of(lambda: publisher.register("NO NAME", folder)) == "INVALID_ARGUMENT"
    assert code_of(lambda: connect(address).register("x", folder)) == "UNAUTHENTICATED"
    assert code_of(lambda: publisher.register("gone", tmp_path / "nowhere")) == "NOT_FOUND"
    publisher.get("two")  # reading is not audited
    lines = audit_lines(audit)
    assert process.end(signal.SIGTERM)[0] == 0
    assert [(line["what"], line["name"], line["who"], line["reason"]) for line in lines] == [
        ("RegisterAdapter", "team-a/one", "a", ""),
        ("UploadAdapter", "team-a/two", "a", ""),
        ("PinAdapter", "team-a/one", "root", ""),
        ("UnpinAdapter", "team-a/one", "root", ""),
        ("DeleteAdapter", "team-a/one", "a", ""),
        ("RollbackAdapter", "team-a/one", "a", ""),
        ("RegisterLayout", "org/tiny", "root", ""),
        ("RegisterAdapter", "team-a/one", "a", ""),
        ("PruneVersions", "team-a/one", "a", ""),
        ("RegisterAdapter", "team-b/x", "a", "PERMISSION_DENIED"),
        ("RegisterAdapter", "NO NAME", "a", "INVALID_ARGUMENT"),
        ("RegisterAdapter", "", "", "UNAUTHENTICATED"),  # what it asks for is not even read
        ("RegisterAdapter", "gone", "a", "SOURCE_NOT_FOUND"),
    ]
    assert [line["result"] for line in lines] == ["ok"] * 9 + ["refused"] * 4
    assert [line["deleted_versions"] for line in lines[5:9]] == [[], [], [1], []]
    assert {line["digest"] for line in lines[:6]} == {made.adapter.digest}
    assert [line["revision"] for line in lines[:6]] == [1, 2, 3, 4, 5, 6]
    assert lines[6]["digest"] == layout_id
    assert all(line["peer"].startswith("ipv4:127.0.0.1:") for line in lines)


@pytest.mark.processes
def test_no_log_holds_a_token_or_a_credential(spawn, connect, make_adapter, tmp_path):
    folder = make_adapter()
    audit = tmp_path / "audit.jsonl"
    policy = write_policy(tmp_path, ROOT, token_lines("a", ["publisher"]))
    secrets = {
        "AWS_ACCESS_KEY_ID": "key-id-of-the-store",
        "AWS_SECRET_ACCESS_KEY": "secret-key-of-the-store",
        "AWS_SESSION_TOKEN": "session-of-the-store",
        "HF_TOKEN": "hub-token-of-the-store",
    }
    process = spawn(
        *("--policy-file", str(policy), "--audit-file", str(audit), "--log-level", "DEBUG"),
        *(
            "--reload-seconds",
            "0",
            "--s3-buckets",
            "bucket",
            "--s3-endpoint-url",
            "http://127.0.0.1:9",
        ),
        **secrets,
    )
    address = process.wait_until_ready()["grpc"]
    known, unknown = connect(address, token_of("a")), connect(address, "token-nobody-knows")
    known.register("one", folder)
    assert code_of(lambda: unknown.register("one", folder)) == "UNAUTHENTICATED"
    assert code_of(lambda: known.register("team-b/one", folder)) == "PERMISSION_DENIED"
    bare = connect(address)
    metadata = (("authorization", "Basic basic-secret"),)
    request = pb.GetAdapterRequest(ref="one")
    assert code_of(lambda: bare.stub.GetAdapter(request, metadata=metadata)) == "UNAUTHENTICATED"
    s3 = pb.RegisterAdapterRequest(name="two", source_uri="s3://bucket/prefix")
    assert code_of(lambda: known.stub.RegisterAdapter(s3, timeout=2)) != "OK"
    write_policy(tmp_path, ROOT, '[tokens.x]\nsha256 = "token-by-mistake"')
    process.signal(signal.SIGHUP)
    until(lambda: "ReloadPolicy" in audit.read_text())
    status, log = process.end(signal.SIGTERM)
    assert status == 0
    everything = log + audit.read_text()
    assert "UNAUTHENTICATED" in everything
    hidden = [token_of("a"), "token-nobody-knows", "basic-secret", "token-by-mistake"]
    for secret in (*hidden, *secrets.values()):
        assert secret not in everything, secret
    for line in log.splitlines():
        json.loads(line)


@pytest.mark.usefixtures("own_threads")
def test_what_is_wrong_with_access_is_one_plain_line(tmp_path, capsys):
    policy = write_policy(tmp_path, ROOT, token_lines("a", ["owner"]))
    problems = [
        ({"listen": "0.0.0.0:0"}, "--listen: 0.0.0.0:0 can be reached from other machines"),
        ({"policy_file": policy}, f"--policy-file {policy}: tokens.a.roles.0: "),
        ({"policy_file": tmp_path / "nowhere"}, "nowhere"),
        ({"tls_cert_file": tmp_path / "cert"}, "--tls-key-file: "),
        ({"audit_file": tmp_path / "nowhere" / "audit"}, "nowhere"),
    ]
    for settings, expected in problems:
        values = {"listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0", **settings}
        assert run_process(StoreSettings(data_dir=tmp_path / "data", **values)) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("loadout: ")
        assert expected in line


@pytest.mark.parametrize("is_open", [True, False])
def test_an_open_address_with_a_word_or_a_policy(serve, connect, tmp_path, is_open):
    word = {"allow_open_access": True} if is_open else {"policy_file": write_policy(tmp_path, ROOT)}
    served = serve(listen="0.0.0.0:0", **word)
    port = served.running.grpc_address.rpartition(":")[2]
    client = connect(f"127.0.0.1:{port}", token_of("root"))
    assert len(client.stub.ListAdapters(pb.ListAdaptersRequest()).adapters) == 0
