"""Sources through the whole store: what is fetched is registered, with the moment it was at."""

from __future__ import annotations

import pytest
from huggingface_hub import constants

from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from tests.support.servers.hub_server import LFS_HOST, HubServer, Repo

pytestmark = pytest.mark.slow


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    server = HubServer()
    yield server
    server.stop()


def files_of(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_adapter_from_the_hub(hub, serve, make_adapter, refused):
    client = serve(
        hf_organizations=("team",), hf_endpoint=hub.url, hf_redirect_hosts=(LFS_HOST,)
    ).client
    repo = hub.repos["team/adapter"] = Repo()
    first = make_adapter(("q_proj",))
    commits = [repo.commit(files_of(first))]
    commits.append(repo.commit(files_of(make_adapter(("q_proj",), seed=1, folder="next"))))
    repo.refs["v1"] = commits[0]

    def register(uri: str) -> pb.Adapter:
        request = pb.RegisterAdapterRequest(name="a", source_uri=uri)
        return client.stub.RegisterAdapter(request).adapter

    old = register("hf://team/adapter@v1")
    assert (old.source_revision, old.source_uri) == (commits[0], "hf://team/adapter@v1")
    assert old.digest == client.register("same", first).adapter.digest
    assert [file.name for file in old.files] == ["adapter_config.json", "adapter_model.safetensors"]
    new = register("hf://team/adapter")
    assert (new.version, new.source_revision) == (2, commits[1])
    with refused("INVALID_ARGUMENT", "source_uri", "--hf-organizations"):
        register("hf://other/adapter")
    with refused("NOT_FOUND", "source_uri", "hf://team/adapter@v9"):
        register("hf://team/adapter@v9")
    assert client.get("a").digest == new.digest
    repo.commit({f"fr/{name}": data for name, data in files_of(first).items()}, "folders")
    assert register("hf://team/adapter/fr@folders").digest == old.digest
    files = files_of(first)
    for name in files:  # cloned without `git lfs`
        cloned = files | {name: b"version https://git-lfs.github.com/spec/v1\noid sha256:4a\n"}
        repo.commit(cloned, "cloned")
        (first / name).write_bytes(cloned[name])
        said = f"{name} is a Git LFS pointer"
        with refused("INVALID_ARGUMENT", said):
            register("hf://team/adapter@cloned")
        with refused("INVALID_ARGUMENT", said):
            client.register("a", first)
        with refused("INVALID_ARGUMENT", said):
            client.upload("a", cloned)
        (first / name).write_bytes(files[name])
