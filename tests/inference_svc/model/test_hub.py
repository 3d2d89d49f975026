"""A model by its name, through huggingface_hub, from a local server that speaks the hub's API."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils._runtime import is_xet_available

from inference_svc.config import InferenceSettings
from inference_svc.errors import UnsupportedModel
from inference_svc.model.checkpoint.hub import download, find_model
from servicekit.errors import InvalidSetting
from servicekit.settings.load import load_settings
from tests.support.servers.hub_server import LFS_HOST, HubServer, Repo

NAME = "team/tiny-1.5"
CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"]}).encode()
FILES = {
    "config.json": CONFIG,
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"model": {"vocab": {"a": 0}}}',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"template",
    "model.safetensors": bytes(5000),
}
NOT_SERVED = {
    "README.md": b"words",
    "pytorch_model.bin": bytes(5000),
    "consolidated.safetensors": bytes(5001),
    "original/model.safetensors": bytes(5002),
    "onnx/config.json": b"{}",
}
SHARDS = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
SHARDED = {name: data for name, data in FILES.items() if name != "model.safetensors"} | {
    "model.safetensors.index.json": json.dumps(SHARDS).encode(),
    "model-1-of-2.safetensors": bytes(4000),
    "model-2-of-2.safetensors": bytes(4001),
}


WITH_INPUTS = FILES | {
    f"sentence_{family}_config.json": b'{"max_seq_length": 8}'
    for family in ("bert", "roberta", "xlm-roberta")
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    server = HubServer()
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name, value in {
        "ENDPOINT": server.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_TOKEN_PATH": str(tmp_path / "none"),
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.chdir(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def repo(hub: HubServer) -> Repo:
    hub.repos[NAME] = repo = Repo()
    repo.commit(FILES | NOT_SERVED)
    return repo


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def fetch(name: str = NAME) -> Path:
    said: list[str] = []
    folder = download(name, said.append, redirect_hosts=[LFS_HOST])
    assert said in ([], [f"downloading {name} from {constants.ENDPOINT} into {cache()}"])
    return folder


def cache() -> str:
    return str(constants.HF_HUB_CACHE)


def settings(model: str = NAME) -> InferenceSettings:
    return load_settings(InferenceSettings, ["--model", model])


@pytest.mark.parametrize(
    "files", [FILES, SHARDED, WITH_INPUTS], ids=["single", "sharded", "inputs"]
)
def test_only_what_is_served_is_downloaded(
    repo: Repo, hub: HubServer, files: dict[str, bytes]
) -> None:
    commit = repo.commit(files | NOT_SERVED)
    folder = fetch()
    assert folder.name == commit
    assert contents(folder) == files
    requests = len(hub.requests)
    assert fetch() == folder
    assert find_model(settings()).model == folder
    assert len(hub.requests) == requests, "the cache has it"


def test_the_name_is_that_of_the_hub(repo: Repo, tmp_path: Path) -> None:
    """However the folder in the cache is named."""
    folder = fetch()
    (tmp_path / "link").symlink_to(folder)
    for model in (NAME, str(folder), "link"):
        assert find_model(settings(model)).base_model_names == (NAME,)
    mine = load_settings(InferenceSettings, ["--model", NAME, "--base-model", "mine"])
    assert find_model(mine).base_model_names == ("mine",)


def test_a_folder_of_that_name_comes_first(repo: Repo, tmp_path: Path) -> None:
    fetch()
    folder = tmp_path / NAME
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(CONFIG)
    found = find_model(settings())
    assert (found.model, found.base_model_names) == (Path(NAME), ("tiny-1.5",))


def test_what_the_cache_has_of_it_is_completed(repo: Repo, hub: HubServer) -> None:
    folder = fetch()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InvalidSetting, match=f"to download it: loadout download {NAME}$"):
        find_model(settings())
    hub.requests.clear()
    assert fetch() == folder
    assert contents(folder) == FILES
    assert not any("/lfs/" in path for path, _ in hub.requests), "the weights are there"


def test_serving_uses_no_network(repo: Repo, hub: HubServer) -> None:
    with pytest.raises(InvalidSetting) as caught:
        find_model(settings())
    assert str(caught.value) == (
        f"no folder {NAME} here, and it is not complete in the hub's cache, {cache()}; to "
        f"download it: loadout download {NAME}"
    )
    assert hub.requests == []


def index_of(name: str) -> dict[str, bytes]:
    return {"model.safetensors.index.json": json.dumps({"weight_map": {"a": name}}).encode()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"config.json": b'{"architectures": ["GPT2LMHeadModel"]}'},
            rf"{NAME}: config.json: architectures = \['GPT2",
        ),
        (
            {"config.json": CONFIG[:-1] + b', "hidden_act": "gelu"}'},
            rf"{NAME}: config.json: hidden_act = 'gelu'",
        ),
        ({"tokenizer.json": None}, "has no tokenizer.json on the hub"),
        ({"tokenizer.json": b"{}"}, rf"{NAME}: .*tokenizer.json has no vocabulary"),
        (index_of("*"), r"names a file that is not a safetensors file in its folder: '\*'"),
        (
            index_of("../../a.safetensors"),
            "names a file that is not a safetensors file in its folder: '../../a",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_before_its_weights(
    repo: Repo, hub: HubServer, change: dict[str, bytes | None], message: str
) -> None:
    changed = {**FILES, **change}
    repo.commit({name: data for name, data in changed.items() if data is not None})
    with pytest.raises(UnsupportedModel, match=message):
        fetch()
    assert not any(path.endswith(".safetensors") or "/lfs/" in path for path in asked(hub))


def asked(hub: HubServer) -> list[str]:
    return [path for path, _ in hub.requests]


def info(**changes: object) -> bytes:
    """What a hub says of the model, with other words."""
    siblings = [{"rfilename": name} for name in FILES]
    return json.dumps({"id": NAME, "sha": "c" * 40, "siblings": siblings} | changes).encode()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"<html>Welcome to our network</html>", "JSONDecodeError: Expecting value: .*"),
        (b"[]", "TypeError: .*"),
        (info(sha=None), "ValueError: the server names no commit: 'None'"),
        (info(sha="../../../evil"), "ValueError: the server names no commit: '../../../evil'"),
        (info(sha="c" * 41), "ValueError: the server names no commit: .*"),
        (info(sha=["c" * 40]), "TypeError: .*"),
        (info(siblings=[{"size": 1}]), "KeyError: 'rfilename'"),
    ],
)
def test_what_is_no_hub_is_told_in_one_line(
    repo: Repo, hub: HubServer, tmp_path: Path, said: bytes, reason: str
) -> None:
    """A captive portal, say. Nothing is written."""
    hub.raw_info = said
    line = f"{NAME} cannot be downloaded from {hub.url} now ({{}}); to try again: loadout download "
    before, after = map(re.escape, line.split("{}"))
    with pytest.raises(InvalidSetting, match=f"^{before}{reason}{after}{NAME}$"):
        fetch()
    assert asked(hub) == [f"/api/models/{NAME}"]
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:99999", "nowhere"])
def test_an_endpoint_that_is_no_address(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    message = rf"^{NAME} cannot be downloaded from {re.escape(endpoint)} now \(.*\); to try again: "
    with pytest.raises(InvalidSetting, match=message):
        fetch()


@pytest.mark.processes
def test_a_variable_that_the_library_does_not_take() -> None:
    """It reads them when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "inference_svc", "download", NAME],
        env={**os.environ, "HF_ENDPOINT": "http://[::1"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        1,
        "",
        f"loadout: {NAME}: the hub's library refuses its environment variables, such as "
        f"HF_ENDPOINT (Invalid IPv6 URL); correct them, then run: loadout download {NAME}\n",
    )


def test_what_could_be_a_folder_is_said_to_be_none(hub: HubServer) -> None:
    with pytest.raises(InvalidSetting) as caught:
        download("models/typo", lambda line: None, or_folder=True)
    assert str(caught.value).startswith("no folder models/typo here, and there is no model models/")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "has no config.json on the hub: it is no model of transformers"),
        ("model.safetensors", "has no model.safetensors on the hub"),
        ("tokenizer.json", "has no tokenizer.json on the hub"),
    ],
)
def test_a_repository_that_is_no_whole_model(repo: Repo, missing: str, message: str) -> None:
    repo.commit({name: data for name, data in FILES.items() if name != missing})
    with pytest.raises(UnsupportedModel, match=message):
        fetch()


def test_a_shard_that_is_missing_shows_before_the_others_are_downloaded(
    repo: Repo, hub: HubServer
) -> None:
    missing, other = "model-2-of-2.safetensors", "model-1-of-2.safetensors"
    repo.commit({name: data for name, data in SHARDED.items() if name != missing})
    with pytest.raises(UnsupportedModel, match=f"has no {missing} on the hub"):
        fetch()
    assert not [path for path, _ in hub.requests if path.endswith(other)]


def gated(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos[NAME].is_gated = True


def private(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos[NAME].token = "hf_another"


def unknown(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos.clear()


def offline(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def unreachable(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")


def without_library(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)


@pytest.mark.parametrize(
    ("happens", "message"),
    [
        (gated, "{name} is gated: ask for access at {url}/{name}, then run: hf auth login"),
        (
            private,
            "there is no model {name} at {url}, or it is private; for a private one run: "
            "hf auth login",
        ),
        (
            unknown,
            "there is no model {name} at {url}, or it is private; for a private one run: "
            "hf auth login",
        ),
        (
            offline,
            "{name} is not complete in the hub's cache, {cache}, and HF_HUB_OFFLINE is set; to "
            "download it: HF_HUB_OFFLINE=0 loadout download {name}",
        ),
        (
            unreachable,
            "{name} cannot be downloaded from http://127.0.0.1:1 now (ConnectError: [Errno 111] "
            "Connection refused); to try again: loadout download {name}",
        ),
        (
            without_library,
            "{name}: for models by name install the hub's library: pip install huggingface_hub",
        ),
    ],
)
def test_one_line_says_the_command_to_run(
    repo: Repo,
    hub: HubServer,
    monkeypatch: pytest.MonkeyPatch,
    happens: Callable[[HubServer, pytest.MonkeyPatch], None],
    message: str,
) -> None:
    happens(hub, monkeypatch)
    with pytest.raises(InvalidSetting) as caught:
        fetch()
    assert str(caught.value) == message.format(name=NAME, url=hub.url, cache=cache())


def test_a_revision_is_downloaded_and_found_without_network(repo: Repo, hub: HubServer) -> None:
    """By commit, tag or branch; the newest is another, and stays so."""
    newest = fetch()
    old = repo.commit({**FILES, "model.safetensors": bytes(6000)}, "v1")
    repo.commit({**FILES, "model.safetensors": bytes(7000)}, "refs/pr/1")
    with pytest.raises(InvalidSetting, match=f"to download it: loadout download {NAME}@{old}$"):
        find_model(settings(f"{NAME}@{old}"))
    assert fetch(f"{NAME}@{old}").name == old
    assert fetch(f"{NAME}@v1").name == old
    assert fetch(f"{NAME}@refs/pr/1").name == repo.refs["refs/pr/1"]
    hub.requests.clear()
    for revision in (old, "v1"):
        found = find_model(settings(f"{NAME}@{revision}"))
        assert (found.model.name, found.base_model_names) == (old, (NAME,))
    assert find_model(settings()).model == newest == find_model(settings(f"{NAME}@main")).model
    assert hub.requests == []
    refs = Path(cache(), f"models--{NAME.replace('/', '--')}", "refs")
    assert sorted(contents(refs)) == ["main", "refs/pr/1", "v1"]


def test_a_revision_that_is_not_there(repo: Repo, hub: HubServer) -> None:
    with pytest.raises(InvalidSetting) as caught:
        fetch(f"{NAME}@v9")
    line = f"{NAME}@v9: the model has no such commit, tag or branch at {hub.url}"
    assert str(caught.value) == line


@pytest.mark.parametrize(
    "name",
    [
        *("nowhere", "./team/tiny", "team/a/b", "team/", "team/a--b"),
        *(f"{NAME}@", f"{NAME}@../../x", f"{NAME}@/etc", f"{NAME}@a@b", f"{NAME}@-x"),
    ],
)
def test_what_is_no_name(hub: HubServer, name: str) -> None:
    with pytest.raises(InvalidSetting, match="is neither a folder nor a model's name on the hub"):
        fetch(name)
    with pytest.raises(InvalidSetting, match=f"--model: {name} is neither a folder nor"):
        settings(name)
    assert hub.requests == []


def test_a_token_is_sent(repo: Repo, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    repo.token = "hf_ours"
    monkeypatch.setenv("HF_TOKEN", "hf_ours")
    assert contents(fetch()) == FILES


def test_other_hosts_are_asked_nothing(repo: Repo, hub: HubServer) -> None:
    message = (
        f"{NAME} cannot be downloaded from {hub.url}: the Hub sends it to {hub.lfs_url}; if you "
        "trust that host, set LOADOUT_HF_REDIRECT_HOSTS to a list with it (default: "
        "huggingface.co,hf.co)"
    )
    with pytest.raises(InvalidSetting, match=f"^{re.escape(message)}$"):
        download(NAME, lambda line: None)
    assert not [path for path, _ in hub.requests if path.startswith("/lfs/")]
    assert contents(fetch()) == FILES, "afterwards the library is as it was"


STORAGE = {"X-Xet-Hash": "0" * 64}


@pytest.mark.parametrize(
    ("refresh", "message"),
    [
        ("http://localhost:{port}/stolen", "with the token to http://localhost:{port};"),
        ("{url}/xet-token/http://10.0.0.1", "sends it to http://10.0.0.1;"),
        ("{url}/xet-token/http://[::1", "sends it to an invalid address;"),
    ],
)
def test_the_storage_that_a_hub_names_is_no_other_host(
    repo: Repo, hub: HubServer, monkeypatch: pytest.MonkeyPatch, refresh: str, message: str
) -> None:
    """The library asks another server, that the hub names, for the storage, with the token."""
    assert is_xet_available()
    monkeypatch.setenv("HF_TOKEN", "hf_ours")
    repo.token = "hf_ours"
    values = {"url": hub.url, "port": hub.url.rpartition(":")[2]}
    hub.xet_headers = {**STORAGE, "X-Xet-Refresh-Route": refresh.format(**values)}
    with pytest.raises(InvalidSetting, match=re.escape(message.format(**values))):
        download(NAME, lambda line: None, redirect_hosts=["localhost"])
    assert not [path for path, _ in hub.requests if path == "/stolen"]


def test_a_password_of_an_endpoint_is_in_no_message(
    repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(constants, "ENDPOINT", "http://us3r:s3cr3t@127.0.0.1:1")
    with pytest.raises(InvalidSetting) as caught:
        download(NAME, said.append)
    assert "127.0.0.1:1" in str(caught.value)
    assert "s3cr3t" not in f"{said} {caught.value}"
