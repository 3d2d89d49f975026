"""The commands against scripted servers: what they print, and how they fail."""

from __future__ import annotations

import http.server
import json
import re
import shlex
import threading

import grpc
import pytest
import typer.main

from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.cli.app import app
from loadout.cli.local import demo
from loadout.inference.v1 import inference_pb2 as inference_pb
from tests.support.loadout.server_info import rank_status

COMMANDS = (
    *("demo", "up", "download", "quantize", "store", "serve"),
    *(
        "register",
        "adapters",
        "check",
        "layouts",
        "versions",
        "rollback",
        "prune",
        "delete",
        "generate",
        "embed",
        "classify",
    ),
    *("load", "unload", "pin", "unpin", "residents"),
    *(
        "inspect",
        "pause",
        "resume",
        "sleep",
        "wake",
        "info",
        "top",
        "bench",
        "verify",
        "debug",
        "profile",
    ),
    *("digest", "strip", "convert", "keygen", "sign", "token"),
)


GROUPS = ("Options", "Connection", "Security")


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ("store", "serve")])
def test_help_has_examples(run, command):
    code, out, err = run(command, "--help")
    assert (code, err) == (0, "")
    assert f"loadout {command}" in out
    assert "Examples:\n" in out


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ("store", "serve")])
def test_help_is_in_plain_words(run, command):
    """Every value has a form that people understand, and what connects stands apart."""
    _, out, _ = run(command, "--help-all")
    # <hex> is the digest's.
    assert not re.search(r"<(?!hex)|\[default|\[env|\brange\b|\[x", out)
    titles = re.findall(r"^(\w+):$", out.partition("Examples:")[0], re.MULTILINE)
    assert titles == [each for each in ("Arguments", *GROUPS) if each in titles]
    assert "--token-file" not in out or titles[-2:] == ["Connection", "Security"]


def test_help_leaves_the_token_and_tls_to_help_all(run):
    _, some, _ = run("register", "--help")
    _, everything, _ = run("register", "--help-all")
    assert "Security:" not in some
    assert "--help-all adds 6 options for the token and TLS." in some
    assert "--tls-ca-file" in everything
    assert "--help-all adds" not in everything
    assert "--help-all adds" not in run("digest", "--help")[1]


def test_no_command_shows_all_of_them(run):
    code, out, err = run()
    assert (code, err) == (0, "")
    listed = out.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert tuple(line.split()[0] for line in listed) == COMMANDS
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)


def test_version(run):
    from importlib.metadata import version

    assert run("--version") == (0, f"loadout {version('loadout')}\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'."),
        (["register", "only-a-name"], "Missing argument 'URI|DIR'."),
        (["generate", "--seed", "x", "hi"], "Invalid value for '--seed'"),
        (["register", "n", "s3://b/p", "--label", "x"], "'x' is not KEY=VALUE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_line_and_2(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("loadout: ")
    assert message in err
    assert len(err.splitlines()) == 1


def test_service_that_is_not_there(run):
    code, out, err = run("adapters", "--store", "127.0.0.1:1")
    assert (code, out) == (1, "")
    assert "127.0.0.1:1" in err
    assert len(err.splitlines()) == 1


def test_adapters_table(run, fake_store):
    too_high = "rank 8 is above 4"
    small = store_pb.ServerVerdict(max_rank=4, reason=too_high)
    large = store_pb.ServerVerdict(max_rank=16, servable=True)
    ready = store_pb.LayoutState(
        layout_id="l",
        state=store_pb.IMAGE_STATE_READY,
        servers=[small, large, large],
        fits=True,
    )
    unknown = store_pb.LayoutState(
        layout_id="m", state=store_pb.IMAGE_STATE_PENDING, servers=[large]
    )
    left = store_pb.LayoutState(layout_id="n", state=store_pb.IMAGE_STATE_READY, fits=True)
    earlier = store_pb.LayoutState(layout_id="o", state=store_pb.IMAGE_STATE_READY)
    adapters = [
        store_pb.Adapter(
            name="default/a",
            version=3,
            rank=8,
            source_bytes=1500,
            base_model="m",
            targets=["k_proj", "q_proj"],
            layout_states=[ready, unknown],
            pinned=True,
        ),
        store_pb.Adapter(name="acme/b", version=1, rank=16, layout_states=[left]),
        store_pb.Adapter(name="acme/c", version=1, rank=16, layout_states=[earlier] * 2),
    ]
    fake_store.on("ListAdapters", store_pb.ListAdaptersResponse(adapters=adapters))
    code, out, _ = run("adapters", "--filter", "tenant=acme")
    assert code == 0
    header, first, second, third = out.splitlines()
    assert header.split() == [
        "adapter",
        "rank",
        "size",
        "base",
        "model",
        "targets",
        "servers",
        "pinned",
    ]
    assert first.split("  ")[0] == "default/a@3"
    assert first.split()[-1] == "yes"
    servers = f"not servable: {too_high}, 2 servable, servable, as far as is known"
    for cell in ("8", "1.5 kB", "k_proj q_proj", servers):
        assert cell in first
    assert second.startswith("acme/b@1")
    assert "no server" in second
    assert "unknown to this store (images: ready)" in third
    assert "no server" not in third
    assert fake_store.requests["ListAdapters"][0].filter == "tenant=acme"


def test_no_adapters(run, fake_store):
    fake_store.on("ListAdapters", store_pb.ListAdaptersResponse())
    assert run("adapters") == (0, "no adapters\n", "")


def test_versions_table(run, fake_store):
    def page(request, context):
        version = 3 - int(request.page_token or "0")
        adapter = store_pb.Adapter(
            name="acme/fr",
            version=version,
            digest="sha256:aa",
            created_by="trainer",
            source_uri="hf://org/fr",
            source_revision="0f3c",
            signed_by="release" if version == 2 else "",
            pinned=version == 2,
        )
        if version == 3:
            adapter.delete_time.GetCurrentTime()
        token = str(3 - version + 1) if version > 1 else ""
        return store_pb.ListVersionsResponse(
            adapters=[adapter], next_page_token=token, current_version=2
        )

    fake_store.on("ListVersions", page)
    code, out, err = run("versions", "acme/fr")
    assert (code, err) == (0, "")
    lines = [line.rstrip() for line in out.splitlines()]
    assert [line.split()[0] for line in lines[1:]] == ["acme/fr@3", "acme/fr@2", "acme/fr@1"]
    assert lines[1].endswith("deleted")
    assert "hf://org/fr 0f3c" in lines[2]
    assert lines[2].endswith("current, pinned, signed by release")
    assert [r.name for r in fake_store.requests["ListVersions"]] == ["acme/fr"] * 3


def test_rollback_and_delete(run, fake_store, registered):
    fake_store.on("RollbackAdapter", store_pb.RollbackAdapterResponse(adapter=registered.adapter))
    code, out, err = run("rollback", "french", "3", "--if-current-digest", "sha256:x")
    assert (code, err) == (0, "")
    assert registered.adapter.digest in out
    [request] = fake_store.requests["RollbackAdapter"]
    assert (request.version, request.if_current_digest) == (3, "sha256:x")
    fake_store.on("DeleteAdapter", store_pb.DeleteAdapterResponse(revision=8))
    assert run("delete", "french", "--version", "2")[1] == "french@2 deleted at revision 8\n"
    assert run("delete", "french")[1] == "french deleted at revision 8\n"


def test_old_versions_are_deleted(run, fake_store, registered):
    registered.deleted_versions.extend([1, 2, 3, 5, 7, 8])
    fake_store.on("RegisterAdapter", registered)
    out = run("register", "a", "s3://b/p", "--keep", "5")[1]
    assert out.endswith(" at revision 41\nolder versions deleted: 1-3, 5, 7-8\n")
    assert fake_store.requests["RegisterAdapter"][0].keep == 5
    fake_store.on("PruneVersions", store_pb.PruneVersionsResponse(deleted_versions=[4]))
    assert run("prune", "a", "--keep", "2") == (0, "a: versions deleted: 4\n", "")
    assert json.loads(run("prune", "a", "--keep", "2", "--json")[1]) == {"deleted_versions": [4]}
    fake_store.on("PruneVersions", store_pb.PruneVersionsResponse())
    assert run("prune", "a", "--keep", "2") == (0, "a: no version to delete\n", "")
    assert run("prune", "a", "--keep", "0")[0] == 2
    assert run("prune", "a")[0] == 2


def test_generate(run, fake_inference, chunks):
    fake_inference.on("Generate", lambda request, context: iter(chunks))
    arguments = ["--adapter", "a", "--temperature", "0", "--max-tokens", "9", "--seed", "4"]
    code, out, err = run("generate", *arguments, "--stop", "x", "--stop", "y", "--stats", "hello=")
    assert (code, out) == (0, "hey\n")
    assert err == (
        "default/a@3, ended by stop, 2 prompt tokens, 3 generated, first token after 250 ms\n"
    )
    [request] = fake_inference.requests["Generate"]
    assert (request.text, request.adapter) == ("hello=", "a")
    assert request.sampling == inference_pb.SamplingParams(
        temperature=0, max_tokens=9, seed=4, stop=["x", "y"]
    )


def test_generate_says_when_no_limit_of_the_callers_cut_the_text_off(run, fake_inference, chunks):
    chunks[-1].finish_reason = inference_pb.FINISH_REASON_LENGTH
    fake_inference.on("Generate", lambda request, context: iter(chunks))
    by_default, by_context = (
        run("generate", *flags, "hello=") for flags in ([], ["--max-tokens", "4"])
    )
    assert by_default == (
        *(0, "hey\n"),
        "loadout: the text was cut off after 3 tokens; --max-tokens asks for more, as far as the "
        "context goes\n",
    )
    assert by_context[2] == (
        "loadout: the text was cut off after 3 tokens, the end of the model's context\n"
    )
    assert run("generate", "--max-tokens", "3", "hello=") == (0, "hey\n", "")


def test_generate_chat_leaves_the_rest_to_the_server(run, fake_inference, chunks):
    fake_inference.on("Generate", lambda request, context: iter(chunks))
    assert run("generate", "--chat", "hello") == (0, "hey\n", "")
    [request] = fake_inference.requests["Generate"]
    assert [(m.role, m.content) for m in request.chat.messages] == [("user", "hello")]
    assert request.sampling == inference_pb.SamplingParams()


def test_generate_asks_for_a_form(run, fake_inference, chunks, tmp_path):
    fake_inference.on("Generate", lambda request, context: iter(chunks))
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text("true")
    grammar.write_text('start: "a"')
    forms = [
        (["--json-schema", '{"type": "null"}'], {"json_schema": '{"type": "null"}'}),
        (["--json-schema", str(schema)], {"json_schema": "true"}),
        (["--regex", "a+"], {"regex": "a+"}),
        (["--choice", "a", "--choice", "b"], {"choice": {"texts": ["a", "b"]}}),
        (["--grammar", str(grammar)], {"grammar": 'start: "a"'}),
    ]
    for arguments, form in forms:
        assert run("generate", *arguments, "hello")[0] == 0
        structure = fake_inference.requests["Generate"][-1].sampling.structure
        assert structure == inference_pb.Structure(**form)
    for arguments, words in (
        (["--regex", "a", "--choice", "a"], "not together with --regex"),
        (["--json-schema", str(tmp_path / "none")], "cannot read"),
    ):
        code, _, err = run("generate", *arguments, "hello")
        assert (code, words in err) == (2, True), err


def test_generate_lost_midway_keeps_what_came(run, fake_inference, chunks, fail):
    def lose(request, context):
        yield chunks[0]
        fail(grpc.StatusCode.UNAVAILABLE, message="Socket closed")(request, context)

    fake_inference.on("Generate", lose)
    code, out, err = run("generate", "hello")
    assert (code, out) == (1, "he")
    assert err == "loadout: Socket closed\n"


@pytest.fixture
def metrics_address():
    """A Prometheus endpoint with two running and one waiting request."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"vllm:num_requests_running 2\nvllm:num_requests_waiting 1\n")

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def running_system(fake_store, fake_inference):
    tier = store_pb.TierStatus(used_bytes=1000, capacity_bytes=4000, images=3, hits=3, misses=1)
    status = store_pb.GetStoreStatusResponse(adapters=7, revision=12, memory=tier)
    fake_store.on("GetStoreStatus", status)
    arena = inference_pb.MemoryUse(name="arena", used_bytes=50, capacity_bytes=200)
    info = inference_pb.GetServerInfoResponse(
        base_model="llama",
        dtype="float32",
        device="cpu",
        layout_id="sha256:00",
        kernels="native avx2",
        limits=inference_pb.ServerLimits(memory_bytes=1000),
        memory=[arena],
    )
    fake_inference.on("GetServerInfo", info)
    resident = inference_pb.ResidentAdapter(
        names=["default/a@1"],
        tier=inference_pb.ADAPTER_TIER_DEVICE,
        bytes=2000,
        rank=8,
        running_requests=5,
    )
    listing = inference_pb.ListResidentAdaptersResponse(adapters=[resident])
    fake_inference.on("ListResidentAdapters", listing)


def test_top_once(run, running_system, metrics_address):
    code, out, err = run("top", "--once", "--inference-metrics", metrics_address)
    assert (code, err) == (0, "")
    for text in (
        "llama  float32 on cpu with native avx2",
        "25%  50 bytes of 200 bytes",
        "20%  200 bytes of at most 1.0 kB",
        "default/a@1",
        "7 adapters, 0 layouts, revision 12",
        "hit rate 75%",
        "no lookups",
    ):
        assert text in out


def test_top_shows_what_answers_and_fails(run, running_system):
    code, out, err = run("top", "--once", "--inference-metrics", "127.0.0.1:1")
    assert code == 1
    assert "no answer: no metrics at 127.0.0.1:1" in out
    assert "default/a@1" in out
    assert err.startswith("loadout: no metrics at 127.0.0.1:1")


@pytest.mark.parametrize("command", ["demo", "up"])
def test_demo_without_its_extra(run, monkeypatch, command):
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    code, out, err = run(command)
    assert (code, out) == (1, "")
    assert err == "loadout: the demo runs an S3 server: pip install 'loadout[demo]'\n"


def test_json_of_tables(run, fake_store, registered):
    adapter = registered.adapter
    fake_store.on("ListAdapters", store_pb.ListAdaptersResponse(adapters=[adapter]))
    fake_store.on(
        "ListVersions", store_pb.ListVersionsResponse(adapters=[adapter], current_version=3)
    )
    fake_store.on("RegisterAdapter", registered)
    [listed] = json.loads(run("adapters", "--json")[1])
    assert (listed["ref"], listed["rank"], listed["labels"]) == ("default/a@3", 8, {})
    versions = json.loads(run("versions", "a", "--json")[1])
    assert versions == {"current_version": 3, "versions": [listed]}
    made = json.loads(run("register", "a", "s3://b/p", "--json")[1])
    assert made == {
        "adapter": listed,
        "revision": 41,
        "deleted_versions": [],
        "base_model_source": "unknown",
        "base_model_reason": "",
        "ignored_config_keys": [],
        "warnings": [],
    }


def test_layouts(run, fake_store):
    ids = [f"sha256:{digit * 64}" for digit in "12"]
    shown = store_pb.LayoutInfo(
        layout_id=ids[0], base_model="org/a", aliases=["a", "b"], max_ranks=[8, 0], images=3
    )
    gone = store_pb.LayoutInfo(
        layout_id=ids[1], base_model="org/b", other_base_models=["org/c"], aliases=["d"]
    )
    pages = {
        "": store_pb.ListLayoutsResponse(layouts=[shown], next_page_token=ids[0]),
        ids[0]: store_pb.ListLayoutsResponse(layouts=[gone]),
    }
    fake_store.on("ListLayouts", lambda request, _: pages[request.page_token])
    rows = [line.split() for line in run("layouts")[1].splitlines()]
    assert rows[1][:9] == ["111111111111", "org/a", "a", "b", "ranks", "up", "to", "8,", "any"]
    assert rows[2][:4] == ["222222222222", "org/b", "org/c", "d"]
    assert [each["layout_id"] for each in json.loads(run("layouts", "--json")[1])] == ids
    fake_store.on("ForgetLayout", store_pb.ForgetLayoutResponse(images=3))
    assert run("layouts", "--forget", "11111111")[1] == f"{ids[0]} forgotten, with 3 images\n"
    assert fake_store.requests["ForgetLayout"][0].layout_id == ids[0]
    for wrong in ("3", "sha256:"):
        code, _, err = run("layouts", "--forget", wrong)
        assert (code, f"no layout has {wrong}" in err) == (1, True)
    assert len(fake_store.requests["ForgetLayout"]) == 1


def test_info(run, running_system):
    code, out, err = run("info")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert ["inference", "base", "model", "llama"] in rows
    assert ["store", "adapters", "7"] in rows
    assert {"threads", "processor", "speed", "products"}.isdisjoint(row[1] for row in rows), (
        "an old server has none"
    )
    found = json.loads(run("info", "--json")[1])
    assert found["server"]["limits"]["memory_bytes"] == 1000
    assert found["store"]["revision"] == 12


def test_info_says_what_a_recurrent_state_costs(run, fake_store, fake_inference):
    fake_store.on("GetStoreStatus", store_pb.GetStoreStatusResponse())
    states = inference_pb.RecurrentStates(
        state_bytes=20_000_000, interval_tokens=512, capacity=40, max_stored=26, used=4, stored=5
    )
    info = inference_pb.GetServerInfoResponse(recurrent_states=states)
    fake_inference.on("GetServerInfo", info)
    code, out, _err = run("info")
    assert code == 0
    text = "20.0 MB each, 40 fit: 4 used, 5 of 26 stored, one every 512 tokens"
    assert text in " ".join(out.split())
    found = json.loads(run("info", "--json")[1])["server"]["recurrent_states"]
    assert (found["state_bytes"], found["stored"]) == (20_000_000, 5)


@pytest.mark.parametrize("stage", [0, 1])
def test_info_has_a_line_for_each_rank(run, fake_store, fake_inference, stage):
    fake_store.on("GetStoreStatus", store_pb.GetStoreStatusResponse())
    ranks = [rank_status(0), rank_status(1, answers=False, stage=stage)]
    ranks.append(rank_status(2, num_threads=1, stage=stage))
    fake_inference.on("GetServerInfo", inference_pb.GetServerInfoResponse(ranks=ranks))
    text = " ".join(run("info")[1].replace("inference", "").split())
    line = (
        "100 bytes resident: weights 40 bytes, pages 30 bytes, adapters 20 bytes; 3 threads on "
        "processors 0-2, 7; per step 300.0 ms computing and 100.0 ms waiting for others; 60 "
        "bytes pulled, 2 pulls in progress"
    )
    first, second = (", stage 0", ", stage 1") if stage else ("", "")
    assert f"rank 0{first} process 4711; {line}" in text
    assert f"rank 1{second} process 4711, which does not answer; {line}" in text
    assert f"rank 2{second} process 4711; {line.replace('3 threads', '1 thread')}" in text
    found = json.loads(run("info", "--json")[1])["server"]["ranks"]
    assert [each["answers"] for each in found] == [True, False, True]
    assert [each["stage"] for each in found] == [0, stage, stage]


@pytest.mark.parametrize("form", ["", "nf4"])
def test_info_says_the_form_of_the_weights(form, run, fake_store, fake_inference):
    fake_store.on("GetStoreStatus", store_pb.GetStoreStatusResponse())
    fake_inference.on("GetServerInfo", inference_pb.GetServerInfoResponse(weight_form=form))
    rows = [line.split() for line in run("info")[1].splitlines()]
    assert (["inference", "weights", form] in rows) == bool(form)
    assert json.loads(run("info", "--json")[1])["server"]["weight_form"] == form


def test_info_names_the_code_for_weights_in_few_bits(run, fake_store, fake_inference):
    fake_store.on("GetStoreStatus", store_pb.GetStoreStatusResponse())
    formats = {"int4, groups of 128": "native", "fp8, per output": "dequantised"}
    info = inference_pb.GetServerInfoResponse(
        weight_formats=[
            inference_pb.WeightFormat(format=form, kernels=code) for form, code in formats.items()
        ]
    )
    fake_inference.on("GetServerInfo", info)
    _code, out, _err = run("info")
    shown = [" ".join(line.split()) for line in out.splitlines()]
    for form, code in formats.items():
        assert f"inference products {form}: {code}" in shown
    found = json.loads(run("info", "--json")[1])["server"]["weight_formats"]
    assert {each["format"]: each["kernels"] for each in found} == formats


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((1, 1, 0), "Xeon: 1 core, 1 processor"),
        ((4, 8, 2.5), "Xeon: 4 cores, 8 processors, quota 2.5"),
        ((4, 8, 8), "Xeon: 4 cores, 8 processors"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_info_shows_the_processor(counts, expected, device, run, fake_store, fake_inference):
    """A CPU's name is shown once; a GPU has a row of its own."""
    fake_store.on("GetStoreStatus", store_pb.GetStoreStatusResponse())
    num_cores, num_processors, quota = counts
    processor = inference_pb.Processor(
        name="Xeon", num_cores=num_cores, num_processors=num_processors, quota=quota
    )
    machine = "Xeon, 8 processors" if device == "cpu" else "NVIDIA H200"
    info = inference_pb.GetServerInfoResponse(device=device, machine=machine, processor=processor)
    fake_inference.on("GetServerInfo", info)
    shown = [" ".join(line.split()) for line in run("info")[1].splitlines()]
    assert f"inference processor {expected}" in shown
    assert f"inference device {'cpu' if device == 'cpu' else 'cuda NVIDIA H200'}" in shown
    found = json.loads(run("info", "--json")[1])["server"]["processor"]
    assert (found["num_cores"], found["num_processors"], found["quota"]) == counts


def test_info_of_what_does_not_answer(run, running_system):
    code, out, err = run("info", "--json", "--store", "127.0.0.1:1")
    assert code == 1
    found = json.loads(out)
    assert found["server"]["base_model"] == "llama"
    assert found["store"]["code"] == "UNAVAILABLE"
    assert "127.0.0.1:1" in err


def test_info_and_top_print_the_reason_of_an_error(
    run, running_system, fake_store, fail, metrics_address
):
    refusal = fail(grpc.StatusCode.PERMISSION_DENIED, reason="ROLE_REQUIRED", message="not yours")
    fake_store.on("GetStoreStatus", refusal)
    top = ("top", "--inference-metrics", metrics_address)
    for command in (("info",), (*top, "--once")):
        code, out, err = run(*command)
        assert (code, err) == (1, "loadout: not yours (ROLE_REQUIRED)\n")
        assert "not yours (ROLE_REQUIRED)" in out
    for command in (("info", "--json"), (*top, "--json")):
        assert json.loads(run(*command)[1])["store"]["reason"] == "ROLE_REQUIRED"


def test_top_json(run, running_system, metrics_address):
    code, out, err = run("top", "--json", "--inference-metrics", metrics_address)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["traffic"]["running"], found["traffic"]["waiting"]) == (2, 1)
    assert found["residents"][0]["names"] == ["default/a@1"]


def examples() -> list[str]:
    commands = typer.main.get_command(app).commands.values()
    epilogs = "\n".join(command.epilog or "" for command in commands)
    return [line.strip() for line in epilogs.splitlines() if line.startswith("  loadout ")]


@pytest.mark.parametrize("example", examples())
def test_example_is_understood(example):
    words = shlex.split(re.split(r" [|>]", example)[0])
    command = typer.main.get_command(app).commands[words[1]]
    command.make_context(words[1], words[2:])
