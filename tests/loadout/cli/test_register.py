"""`loadout register` against a scripted store: what it sends, prints and waits for."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys

import grpc
import pytest

from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.cli.adapters import verdicts
from loadout.signing import SigningKey, format_signature


def test_register_uri(run, fake_store, registered):
    fake_store.on("RegisterAdapter", registered)
    code, out, err = run(
        "register", "a", "s3://b/p", "--pin", "--label", "team=x=y", "--base-model", "m"
    )
    assert (code, out, err) == (0, "default/a@3 rank 8 sha256:00 at revision 41\n", "")
    [request] = fake_store.requests["RegisterAdapter"]
    assert (request.name, request.source_uri, request.base_model) == ("a", "s3://b/p", "m")
    assert request.pinned
    assert dict(request.labels) == {"team": "x=y"}


def test_register_folder(run, fake_store, adapter_folder):
    adapter = store_pb.Adapter(name="default/a", version=1, rank=2, digest="sha256:01")
    adapter.base_model = "org/base"
    answer = store_pb.UploadAdapterResponse(
        adapter=adapter,
        revision=5,
        base_model_source=store_pb.BASE_MODEL_SOURCE_ONLY_SERVED,
        base_model_reason="the only one",
        ignored_config_keys=["note", "x"],
        warnings=["q_proj: much too large"],
    )
    fake_store.on("UploadAdapter", answer)
    code, out, err = run("register", "a", str(adapter_folder))
    assert "warning: q_proj: much too large\n" in err
    assert (code, out) == (
        0,
        "default/a@1 rank 2 sha256:01 at revision 5\n"
        "base model org/base: the only one\n"
        "unknown config keys that the operator allows: note, x\n"
        "no server serves base model org/base\n",
    )
    [messages] = fake_store.requests["UploadAdapter"]
    assert {m.chunk.file_name for m in messages[1:]} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_register_with_a_signature(run, fake_store, adapter_folder, tmp_path):
    signed = SigningKey.create(tmp_path / "release.pem").sign("sha256:" + "01" * 32)
    (tmp_path / "a.sig").write_text(f"{format_signature(signed)}\n")
    fake_store.on("UploadAdapter", store_pb.UploadAdapterResponse())
    arguments = ("register", "a", str(adapter_folder), "--signature", str(tmp_path / "a.sig"))
    assert run(*arguments)[0] == 0
    [messages] = fake_store.requests["UploadAdapter"]
    sent = messages[0].meta.signature
    assert (sent.key_id, sent.value) == ("release", signed.value)


def test_a_link_to_a_file_of_the_users_is_not_sent(run, fake_store, adapter_folder, tmp_path):
    fake_store.on("UploadAdapter", store_pb.UploadAdapterResponse())
    (tmp_path / "id_ed25519").write_text("secret")
    (adapter_folder / "chat_template.jinja").symlink_to("../id_ed25519")
    code, out, err = run("register", "a", str(adapter_folder))
    assert (code, out) == (1, "")
    assert err.startswith(f"loadout: {adapter_folder}/chat_template.jinja is a link, which is not ")
    assert fake_store.requests == {}


@pytest.mark.timeout(60)
def test_a_signature_is_one_short_line(run, fake_store, adapter_folder):
    code, out, err = run("register", "a", str(adapter_folder), "--signature", "/dev/zero")
    assert (code, out) == (1, "")
    assert err == "loadout: /dev/zero: does not consist of a key's name and a signature in base64\n"


def layout_state(
    state: int, *servers: store_pb.ServerVerdict, fits: bool = False
) -> store_pb.LayoutState:
    layout_id = "sha256:" + "5" * 64
    fits = fits or state == store_pb.IMAGE_STATE_READY
    return store_pb.LayoutState(layout_id=layout_id, state=state, servers=servers, fits=fits)


def earlier_states(*states: int) -> list[store_pb.LayoutState]:
    """As a store of 0.2 sends them."""
    return [
        store_pb.LayoutState(layout_id="sha256:" + str(number) * 64, state=state)
        for number, state in enumerate(states, start=1)
    ]


LARGE = store_pb.ServerVerdict(max_rank=64, servable=True)
SMALL = store_pb.ServerVerdict(
    max_rank=4, reason="rank 8 is above this server's limit 4 (--max-rank)"
)
FIRST_ID = "sha256:" + "f" * 64


def rank_state(
    index: int, state: int = store_pb.IMAGE_STATE_READY, reason: str = ""
) -> store_pb.LayoutState:
    """A state of one of two ranks' layouts, whose verdict has this reason, or none."""
    server = store_pb.ServerVerdict(
        announcement_id="sha256:" + "e" * 64 if index else FIRST_ID,
        max_rank=64,
        servable=not reason,
        reason=reason,
        num_ranks=2,
        rank_index=index,
        first_announcement_id=FIRST_ID if index else "",
    )
    layout_id = "sha256:" + str(index + 1) * 64
    return store_pb.LayoutState(layout_id=layout_id, state=state, servers=[server], fits=True)


NOTED = store_pb.ServerVerdict(servable=True, note="trained on the nf4 form, served on int4")
NONE = store_pb.ServerVerdict(reason="shape [8, 32] has 32 in_features, q_proj has 64")


@pytest.mark.parametrize(
    ("states", "lines", "code", "why"),
    [
        (
            [layout_state(store_pb.IMAGE_STATE_READY, LARGE, SMALL)],
            [
                "servable by layout 555555555555, ranks up to 64",
                "not servable by layout 555555555555, ranks up to 4: "
                "rank 8 is above this server's limit 4 (--max-rank)",
            ],
            0,
            "",
        ),
        (
            [layout_state(store_pb.IMAGE_STATE_PENDING, SMALL)],  # not waited for
            [
                "not servable by layout 555555555555, ranks up to 4: "
                "rank 8 is above this server's limit 4 (--max-rank)"
            ],
            1,
            "no server of its base model can serve it",
        ),
        (
            [
                layout_state(store_pb.IMAGE_STATE_INCOMPATIBLE, NONE),
                layout_state(store_pb.IMAGE_STATE_READY),  # its servers have gone
            ],
            [
                "not servable by layout 555555555555: "
                "shape [8, 32] has 32 in_features, q_proj has 64"
            ],
            1,
            "no server of its base model can serve it",
        ),
        (
            [layout_state(store_pb.IMAGE_STATE_PENDING, LARGE, fits=True)],  # compiled when pulled
            [
                "servable by layout 555555555555, ranks up to 64; "
                "its image is compiled when it is first used"
            ],
            0,
            "",
        ),
        (
            [layout_state(store_pb.IMAGE_STATE_READY, NOTED)],
            [
                "servable by layout 555555555555; note: trained on the nf4 form, served on int4",
            ],
            0,
            "",
        ),
        (
            earlier_states(store_pb.IMAGE_STATE_READY, store_pb.IMAGE_STATE_PENDING),
            [
                "layout 111111111111: image ready, "
                "this store, of an earlier release, does not report which servers can serve it",
                "layout 222222222222: image pending, "
                "this store, of an earlier release, does not report which servers can serve it",
            ],
            1,
            "this store, of an earlier release, does not report which servers can serve it",
        ),
        (
            [rank_state(1), rank_state(0), layout_state(store_pb.IMAGE_STATE_READY, LARGE)],
            [
                "servable by layout 111111111111, 2 processes, ranks up to 64",
                "servable by layout 555555555555, ranks up to 64",
            ],
            0,
            "",
        ),
        (
            [rank_state(0), rank_state(1, store_pb.IMAGE_STATE_INCOMPATIBLE, "it has a bias")],
            [
                "servable by layout 111111111111, rank 0 of 2 processes, ranks up to 64",
                "not servable by layout 222222222222, rank 1 of 2 processes, ranks up to "
                "64: it has a bias",
            ],
            1,
            "no server of its base model can serve it",
        ),
        ([], ["no server serves base model org/base"], 1, "no server serves base model org/base"),
    ],
)
def test_register_says_which_servers_can_serve_it(
    run, fake_store, registered, states, lines, code, why
):
    registered.base_model_reason = "as given"
    registered.adapter.base_model = "org/base"
    registered.adapter.layout_states.extend(states)
    fake_store.on("RegisterAdapter", registered)
    assert run("register", "a", "s3://b/p")[1].splitlines()[2:] == lines
    required = run("register", "a", "s3://b/p", "--require-servable")
    assert required[0] == code
    assert required[1].splitlines()[2:] == lines
    assert required[2] == (f"loadout: default/a@3 is registered, but {why}\n" if why else "")


def test_register_waits_for_the_images(run, fake_store, registered):
    registered.adapter.layout_states.append(layout_state(store_pb.IMAGE_STATE_COMPILING, LARGE))
    fake_store.on("RegisterAdapter", registered)
    done = store_pb.Adapter()
    done.CopyFrom(registered.adapter)
    done.layout_states[0].state = store_pb.IMAGE_STATE_READY
    done.layout_states[0].fits = True
    fake_store.on("GetAdapter", store_pb.GetAdapterResponse(adapter=done))
    code, out, _ = run("register", "a", "s3://b/p", "--require-servable", "--json")
    assert code == 0
    assert json.loads(out)["adapter"]["layout_states"][0]["state"] == "ready"


def test_register_does_not_wait_for_ever(run, fake_store, registered, monkeypatch):
    monkeypatch.setattr(verdicts, "WAIT_S", 0.0)
    monkeypatch.setattr(verdicts, "REQUIRED_WAIT_S", 0.0)
    registered.base_model_reason = "as given"
    registered.adapter.layout_states.append(layout_state(store_pb.IMAGE_STATE_PENDING, LARGE))
    fake_store.on("RegisterAdapter", registered)
    code, out, _ = run("register", "a", "s3://b/p")
    assert (code, out.splitlines()[2]) == (
        0,
        "servable by layout 555555555555, ranks up to 64, as far as is known: its image is pending",
    )
    code, _, err = run("register", "a", "s3://b/p", "--require-servable")
    assert (code, "it is not known after" in err) == (1, True)


def test_a_rank_that_is_not_announced_yet_is_not_known(run, fake_store, registered, monkeypatch):
    monkeypatch.setattr(verdicts, "REQUIRED_WAIT_S", 0.0)
    registered.base_model_reason = "as given"
    registered.adapter.layout_states.append(rank_state(1))
    fake_store.on("RegisterAdapter", registered)
    code, out, err = run("register", "a", "s3://b/p", "--require-servable")
    place = "layout 222222222222, rank 1 of 2 processes, ranks up to 64"
    assert out.splitlines()[2:] == [f"servable by {place}"]
    assert (code, "it is not known after" in err) == (1, True)


def test_adapters_count_the_ranks_of_a_server_as_one(run, fake_store, registered):
    states = [rank_state(0), rank_state(1)]
    registered.adapter.layout_states.extend(states)
    listed = store_pb.ListAdaptersResponse(adapters=[registered.adapter])
    fake_store.on("ListAdapters", listed)
    assert "  servable" in run("adapters")[1]
    states[1].servers[0].MergeFrom(store_pb.ServerVerdict(reason="it has a bias"))
    states[1].servers[0].servable = False
    del listed.adapters[0].layout_states[:]
    listed.adapters[0].layout_states.extend(states)
    fake_store.on("ListAdapters", listed)
    assert "not servable: it has a bias" in run("adapters")[1]


def test_what_is_registered_stays_so_if_it_is_deleted_then(run, fake_store, registered, fail):
    registered.base_model_reason = "as given"
    registered.adapter.layout_states.append(layout_state(store_pb.IMAGE_STATE_PENDING, LARGE))
    fake_store.on("RegisterAdapter", registered)
    fake_store.on("GetAdapter", fail(grpc.StatusCode.NOT_FOUND, "NOT_FOUND", "ref"))
    code, out, _ = run("register", "a", "s3://b/p", "--json")
    assert (code, json.loads(out)["adapter"]["ref"]) == (0, "default/a@3")
    code, _, err = run("register", "a", "s3://b/p", "--require-servable")
    assert (code, err.startswith("loadout: default/a@3 is registered, but")) == (1, True)


def test_register_what_is_not_there(run, tmp_path):
    code, out, err = run("register", "a", str(tmp_path / "nowhere"))
    assert (code, out) == (1, "")
    assert err.startswith(f"loadout: {tmp_path}/nowhere is not a directory")
    assert len(err.splitlines()) == 1


def test_refusal_is_one_plain_line_and_1(run, fake_store, fail):
    refusal = fail(
        grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ADAPTER", "lora_A", message="lora_A has NaN"
    )
    fake_store.on("RegisterAdapter", refusal)
    assert run("register", "a", "s3://b/p") == (
        1,
        "",
        "loadout: lora_A has NaN (INVALID_ADAPTER)\n",
    )


@pytest.mark.processes
def test_upload_shows_its_progress_on_a_terminal(store_server, fake_store, adapter_folder):
    fake_store.on("UploadAdapter", store_pb.UploadAdapterResponse(revision=5))
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "loadout.cli", "register", "a", str(adapter_folder)]
    environment = {**os.environ, "LOADOUT_STORE": store_server.address, "TERM": "xterm"}
    done = subprocess.run(
        command, env=environment, stdin=end, stdout=subprocess.PIPE, stderr=end, timeout=60
    )
    os.close(end)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal says that nobody writes to it any more
        while data := os.read(terminal, 4096):
            shown += data
    os.close(terminal)
    assert done.returncode == 0
    assert done.stdout.decode().endswith("at revision 5\n")
    assert b"uploading" in shown
    assert b"1.3/1.3 MB" in shown
