"""A model by its name, through huggingface_hub, from a local server that speaks the hub's API."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from inference_svc.config import InferenceSettings
from inference_svc.errors import UnsupportedModel
from inference_svc.model.hub import download, find_model
from servicekit.errors import InvalidSetting
from servicekit.settings.load import load_settings
from tests.support.hub_server import HubServer, Repo

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
    folder = download(name, said.append)
    assert said in ([], [f"downloading {name} from {constants.ENDPOINT} into {cache()}"])
    return folder


def cache() -> str:
    return str(constants.HF_HUB_CACHE)


def settings(model: str = NAME) -> InferenceSettings:
    return load_settings(InferenceSettings, ["--model", model])


@pytest.mark.parametrize("files", [FILES, SHARDED], ids=["single", "sharded"])
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
        f"{NAME} is no folder here, and it is not complete in the hub's cache, {cache()}; to "
        f"download it: loadout download {NAME}"
    )
    assert hub.requests == []


def test_what_cannot_be_served_is_refused_before_its_weights(repo: Repo, hub: HubServer) -> None:
    repo.commit(FILES | {"config.json": b'{"architectures": ["GPT2LMHeadModel"]}'})
    with pytest.raises(UnsupportedModel, match=rf"{NAME}: config.json: architectures = \['GPT2"):
        fetch()
    assert not any("safetensors" in path or "/lfs/" in path for path, _ in hub.requests)


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


@pytest.mark.parametrize("name", ["nowhere", "./team/tiny", "team/a/b", "team/", "team/a--b"])
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
