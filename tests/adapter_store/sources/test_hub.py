"""Against a local server that speaks the hub's API, through huggingface_hub itself."""

from __future__ import annotations

import logging
import os

import pytest
from huggingface_hub import constants, hf_hub_download

from adapter_store.errors import InvalidAdapter, LimitExceeded, SourceUnavailable
from adapter_store.sources.hub import HubPlace, HubSource, place_of
from adapter_store.sources.transfer import RetryPolicy
from servicekit.errors import FailedPrecondition, InvalidArgument, NotFound
from tests.adapter_store.sources.faulty import Fault, FaultyProxy
from tests.support.servers.hub_server import LFS_HOST, HubServer, Repo

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BODY = bytes(range(256)) * 40
FILES = {CONFIG: b"{}", WEIGHTS: BODY, "README.md": b"not needed", "training_args.bin": b"x" * 5000}
QUICK = RetryPolicy(attempts=3, first_seconds=0.01, max_seconds=0.02)
SECRET = "hf_s3cr3tt0ken"


@pytest.fixture(autouse=True)
def chain(monkeypatch, tmp_path):
    """The hub's own chain finds nothing of this machine's."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "default-cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def hub():
    server = HubServer()
    yield server
    server.stop()


@pytest.fixture
def repo(hub) -> Repo:
    hub.repos["team/adapter"] = repo = Repo()
    repo.commit(FILES)
    return repo


@pytest.fixture
def source(hub) -> HubSource:
    return HubSource(["team"], hub.url, retry=QUICK, redirect_hosts=[LFS_HOST])


@pytest.fixture
def proxy(hub):
    proxy = FaultyProxy(hub.url)
    hub.lfs_url = proxy.url
    yield proxy
    proxy.stop()


@pytest.fixture
def shaky(proxy) -> HubSource:
    return HubSource(["team"], proxy.url, retry=QUICK, redirect_hosts=[])


def contents(staging) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in staging.folder.iterdir()}


@pytest.mark.parametrize(
    ("uri", "place"),
    [
        ("hf://team/adapter", HubPlace("team", "adapter", "main")),
        ("hf://team/adapter@v1.0", HubPlace("team", "adapter", "v1.0")),
        ("hf://team/a.b-c_d@refs/pr/3", HubPlace("team", "a.b-c_d", "refs/pr/3")),
        ("hf://team/adapter/fr", HubPlace("team", "adapter", "main", "fr")),
        ("hf://team/a/_b/c.d-e@refs/pr/3", HubPlace("team", "a", "refs/pr/3", "_b/c.d-e")),
    ],
)
def test_uris(uri, place):
    assert place_of(uri) == place
    assert place_of(str(place)) == place


@pytest.mark.parametrize(
    "uri",
    [
        "hf://team",
        "hf://team/",
        "hf://team/adapter/",
        "hf://team/adapter/../other",
        "hf://team/adapter/a/..@main",
        "hf://team/adapter/.hidden",
        "hf://team/adapter/a//b",
        "hf://team/adapter/a%2f..",
        "hf://team/adapter/a b",
        "hf://team/adapter/a\\b",
        "hf://team/adapter/" + "/".join("abcdefghi"),
        "hf://../a",
        "hf://team/..",
        "hf://team/a--b",
        "hf://team/a.",
        "hf://team/adapter@",
        "hf://team/adapter@../../api",
        "hf://team/adapter@a//b",
        "hf://team/adapter@a?x=1",
        "hf://user:pass@team/adapter",
        "hf://team/adapter%2f..",
    ],
)
def test_malformed_uris(source, staging, uri):
    with pytest.raises(InvalidArgument, match="hf://organisation/name@revision") as caught:
        source.fetch(uri, staging)
    assert caught.value.subject == "source_uri"


def test_only_the_adapters_files_are_read(hub, source, repo, staging):
    assert source.fetch("hf://team/adapter", staging) == repo.refs["main"]
    assert contents(staging) == {CONFIG: b"{}", WEIGHTS: BODY}
    assert not any("training_args" in path or "README" in path for path, _ in hub.requests)
    assert not (staging.folder.parent / "default-cache").exists()


def test_a_branch_a_tag_and_a_commit(source, repo, make_staging):
    first = repo.refs["main"]
    second = repo.commit({**FILES, CONFIG: b"{ }"}, "refs/pr/1")
    repo.refs["v1"] = first
    for revision, commit in (("v1", first), ("refs/pr/1", second), (second, second)):
        staging = make_staging()
        assert source.fetch(f"hf://team/adapter@{revision}", staging) == commit
        assert contents(staging) == {name: repo.commits[commit][name] for name in (CONFIG, WEIGHTS)}


def test_a_revision_that_moves_while_it_is_read_is_not_mixed(shaky, proxy, repo, staging):
    before = repo.refs["main"]
    moved = {CONFIG: b"[]", WEIGHTS: BODY[::-1]}
    proxy.faults = [Fault("/api/models/", action=lambda: repo.commit(moved))]
    assert shaky.fetch("hf://team/adapter@main", staging) == before
    assert contents(staging) == {CONFIG: b"{}", WEIGHTS: BODY}


def test_other_organisations_are_refused_without_a_request(hub, staging):
    hub.repos["other/adapter"] = Repo()
    with pytest.raises(InvalidArgument, match="--hf-organizations") as caught:
        HubSource(["team"], hub.url).fetch("hf://other/adapter", staging)
    assert caught.value.reason == "SOURCE_NOT_ALLOWED"
    assert hub.requests == []


def test_a_repository_that_moved_to_another_owner_is_refused(hub, source, staging):
    hub.repos["other/adapter"] = Repo()
    hub.repos["other/adapter"].commit(FILES)
    hub.moved["team/adapter"] = "other/adapter"
    with pytest.raises(NotFound, match="has moved to 'other/adapter'"):
        source.fetch("hf://team/adapter", staging)
    assert contents(staging) == {}


def test_what_is_missing_is_named(source, repo, staging):
    for uri in ("hf://team/nowhere@main", "hf://team/adapter@v9"):
        with pytest.raises(NotFound, match=uri) as caught:
            source.fetch(uri, staging)
        assert caught.value.reason == "SOURCE_NOT_FOUND"
    repo.commit({CONFIG: b"{}"})
    with pytest.raises(InvalidAdapter, match=f"{WEIGHTS} is missing"):
        source.fetch("hf://team/adapter", staging)
    repo.commit({CONFIG: b"{}", "adapter_model.bin": b"\x80"})
    with pytest.raises(InvalidAdapter, match="is a pickle"):
        source.fetch("hf://team/adapter", staging)


def test_adapters_in_folders_are_listed(source, repo, staging):
    """vllm#20320, #20612: the answer has the address to write."""
    names = (
        "best",
        "checkpoint-5",
        "checkpoint-10",
        "a/b",
        "/".join("abcdefghi"),
        "..",
        "odd name",
    )
    repo.commit({f"{name}/{CONFIG}": b"{}" for name in names})
    with pytest.raises(InvalidAdapter) as caught:
        source.fetch("hf://team/adapter", staging)
    assert str(caught.value) == (
        f"hf://team/adapter@main: {CONFIG} is missing; below it are checkpoint-10, checkpoint-5, "
        "best, a/b: register one of them, such as hf://team/adapter/checkpoint-10@main"
    )
    with pytest.raises(InvalidAdapter, match=r"such as hf://team/adapter/a/b@main$"):
        source.fetch("hf://team/adapter/a", staging)


def test_many_adapters_in_folders_are_listed_in_part(source, repo, staging):
    repo.commit({f"lora-{number:03}/{CONFIG}": b"{}" for number in range(500)})
    with pytest.raises(InvalidAdapter, match=" and 492 others: register one") as caught:
        source.fetch("hf://team/adapter", staging)
    assert len(str(caught.value)) < 300


IN_FOLDERS = {
    **{f"{name}/{CONFIG}": b"{}" for name in ("fr", "fr/old", "de")},
    f"fr/{WEIGHTS}": BODY,
    f"de/{WEIGHTS}": BODY[::-1],
    f"fr/old/{WEIGHTS}": BODY[5000:],
    "new_embeddings.safetensors": b"x",
    "fr/optimizer.pt": b"x",
    "french/README.md": b"x",
}
"""Adapters in folders, with content beside them that would be refused."""


@pytest.mark.parametrize("folder", ["fr", "de", "fr/old"])
def test_an_adapter_in_a_folder(hub, source, repo, make_staging, folder):
    """vllm#20320, #20612: `hf://org/repo/sub@rev`, one adapter of a repository."""
    repo.refs["v1"] = commit = repo.commit(IN_FOLDERS)
    files = {name: IN_FOLDERS[f"{folder}/{name}"] for name in (CONFIG, WEIGHTS)}
    for revision in ("", "@v1", f"@{commit}"):
        staging = make_staging()
        hub.requests.clear()
        assert source.fetch(f"hf://team/adapter/{folder}{revision}", staging) == commit
        assert contents(staging) == files
        read = {path.partition(commit)[2] for path, _ in hub.requests if "/resolve/" in path}
        assert read == {f"/{folder}/{name}" for name in (CONFIG, WEIGHTS)}


@pytest.mark.parametrize("folder", ["f", "fr/o", "FR", "fr/adapter_config.json"])
def test_a_folder_that_is_not_there(source, repo, staging, folder):
    repo.commit(IN_FOLDERS)
    with pytest.raises(InvalidAdapter) as caught:
        source.fetch(f"hf://team/adapter/{folder}", staging)
    assert str(caught.value) == f"hf://team/adapter/{folder}@main: {CONFIG} is missing"
    assert contents(staging) == {}


def test_names_that_lead_out_of_a_folder_are_no_files_of_it(source, repo, staging):
    repo.commit({f"fr/../{CONFIG}": b"{}", f"fr//{CONFIG}": b"{}", f"fr/{CONFIG}/x": b"{}"})
    with pytest.raises(InvalidAdapter, match=f"{CONFIG} is missing"):
        source.fetch("hf://team/adapter/fr", staging)


def test_what_would_be_dropped_is_refused_and_what_lies_below_is_not(source, repo, make_staging):
    repo.commit({**FILES, "optimizer.pt": b"x", "last/new_embeddings.safetensors": b"x"})
    source.fetch("hf://team/adapter", make_staging())
    repo.commit({**FILES, "new_embeddings.safetensors": b"x"})
    with pytest.raises(InvalidAdapter, match=r"new_embeddings\.safetensors: rows of ") as caught:
        source.fetch("hf://team/adapter", make_staging())
    assert caught.value.reason == "FILE_UNUSED"


def test_mlx_weights_are_read(source, repo, staging):
    files = {CONFIG: b"{}", "adapters.safetensors": BODY}
    repo.commit({**files, "0000100_adapters.safetensors": b"x", "README.md": b"x"})
    source.fetch("hf://team/adapter", staging)
    assert contents(staging) == files


def test_a_private_repository_needs_the_chains_token(hub, source, repo, make_staging, monkeypatch):
    repo.token = SECRET
    with pytest.raises(NotFound, match="or needs a token"):
        source.fetch("hf://team/adapter", make_staging())
    monkeypatch.setenv("HF_TOKEN", SECRET)
    assert source.fetch("hf://team/adapter", make_staging()) == repo.refs["main"]
    sent = {token for path, token in hub.requests if path.startswith("/lfs/")}
    assert sent == {""}, "the token went to the host that keeps the large files"


def test_a_gated_repository(source, repo, staging):
    repo.is_gated = True
    with pytest.raises(FailedPrecondition, match="gated") as caught:
        source.fetch("hf://team/adapter", staging)
    assert caught.value.reason == "SOURCE_ACCESS_DENIED"


def test_a_token_is_in_no_message_or_log(shaky, proxy, repo, staging, monkeypatch, caplog):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    caplog.set_level(logging.DEBUG)
    proxy.faults = [Fault(WEIGHTS, status=403, times=100)]
    with pytest.raises(FailedPrecondition) as caught:
        shaky.fetch("hf://team/adapter", staging)
    assert SECRET not in f"{caught.value} {caplog.text}"


def test_limits_hold_before_the_first_byte(hub, source, repo, make_staging):
    staging = make_staging(max_file_bytes=len(BODY) - 1)
    with pytest.raises(LimitExceeded, match=WEIGHTS):
        source.fetch("hf://team/adapter", staging)
    assert contents(staging) == {}
    assert not any("/resolve/" in path for path, _ in hub.requests)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_content_that_the_commit_does_not_record_is_refused(hub, source, repo, staging, name):
    hub.tampered[name] = FILES[name][::-1]
    with pytest.raises(SourceUnavailable, match=f"{name} is not the file that commit") as caught:
        source.fetch("hf://team/adapter", staging)
    assert caught.value.reason == "SOURCE_CHANGED"


def test_content_of_another_length_is_refused(hub, source, repo, staging):
    hub.tampered[WEIGHTS] = BODY + b"more"
    with pytest.raises(SourceUnavailable, match=f"has {len(BODY) + 4} bytes"):
        source.fetch("hf://team/adapter", staging)


def test_an_answer_from_another_commit_is_refused(hub, source, repo, staging):
    hub.answered_commit = "0" * 40
    with pytest.raises(SourceUnavailable, match="another commit"):
        source.fetch("hf://team/adapter", staging)


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[]", b'{"id": "team/adapter"}', b'{"id": "team/adapter", "sha": "main"}'],
)
def test_a_server_that_is_no_hub(hub, source, repo, staging, body):
    hub.raw_info = body
    with pytest.raises(SourceUnavailable, match=r"hub's API|names no commit"):
        source.fetch("hf://team/adapter", staging)


@pytest.mark.parametrize("then", ["reset", "closed"])
def test_broken_connection_is_resumed(shaky, proxy, repo, staging, then):
    proxy.faults = [Fault("/lfs/", after=5000, then=then)]
    shaky.fetch("hf://team/adapter", staging)
    assert contents(staging)[WEIGHTS] == BODY
    assert sum("/lfs/" in path for path, _ in proxy.gets) == 2


@pytest.mark.parametrize("path", ["/api/models/", "/resolve/", "/lfs/"])
@pytest.mark.parametrize("status", [429, 503])
def test_busy_hub_is_retried(shaky, proxy, repo, staging, path, status):
    proxy.faults = [Fault(path, status=status, times=2)]
    shaky.fetch("hf://team/adapter", staging)
    assert contents(staging) == {CONFIG: b"{}", WEIGHTS: BODY}


@pytest.mark.parametrize("path", ["/api/models/", "/lfs/"])
def test_a_hub_that_stays_busy_is_unavailable(shaky, proxy, repo, staging, path):
    proxy.faults = [Fault(path, status=503, times=1000)]
    with pytest.raises(SourceUnavailable, match="503"):
        shaky.fetch("hf://team/adapter", staging)


def test_no_answer(staging):
    with pytest.raises(SourceUnavailable, match="hf://team/adapter@main"):
        HubSource(["team"], "http://127.0.0.1:9", retry=QUICK).fetch("hf://team/adapter", staging)


@pytest.fixture
def cache(hub, repo, tmp_path, monkeypatch):
    """A cache folder that huggingface_hub filled itself; now offline."""
    folder = tmp_path / "cache"
    for name in (CONFIG, WEIGHTS):
        hf_hub_download("team/adapter", name, endpoint=hub.url, cache_dir=folder)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    return folder


def test_offline_the_cache_is_read(hub, repo, cache, make_staging):
    source = HubSource(["team"], hub.url, cache)
    for revision in ("main", repo.refs["main"]):
        staging = make_staging()
        assert source.fetch(f"hf://team/adapter@{revision}", staging) == repo.refs["main"]
        assert contents(staging) == {CONFIG: b"{}", WEIGHTS: BODY}
        assert not any(path.is_symlink() for path in staging.folder.iterdir())
    assert hub.requests == []


@pytest.mark.parametrize("folder", ["fr", "fr/old"])
def test_offline_a_folder_of_the_cache_is_read(hub, repo, tmp_path, monkeypatch, staging, folder):
    commit = repo.commit(IN_FOLDERS)
    for name in (CONFIG, WEIGHTS):
        hf_hub_download(
            "team/adapter", f"{folder}/{name}", endpoint=hub.url, cache_dir=tmp_path / "cache"
        )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    source = HubSource(["team"], hub.url, tmp_path / "cache")
    assert source.fetch(f"hf://team/adapter/{folder}", staging) == commit
    assert contents(staging) == {name: IN_FOLDERS[f"{folder}/{name}"] for name in (CONFIG, WEIGHTS)}
    with pytest.raises(NotFound, match="HF_HUB_OFFLINE"):
        source.fetch("hf://team/adapter/de", staging)


def test_offline_what_is_not_cached_is_not_there(hub, cache, staging, monkeypatch):
    for uri in ("hf://team/other", "hf://team/adapter@v9"):
        with pytest.raises(NotFound, match="HF_HUB_OFFLINE"):
            HubSource(["team"], hub.url, cache).fetch(uri, staging)
    with pytest.raises(InvalidArgument, match="--hf-organizations"):
        HubSource(["else"], hub.url, cache).fetch("hf://team/adapter", staging)


def test_a_cache_link_that_leads_out_is_refused(hub, cache, staging, tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    (link,) = cache.glob(f"models--team--adapter/snapshots/*/{WEIGHTS}")
    link.unlink()
    os.symlink(tmp_path / "secret", link)
    with pytest.raises(InvalidArgument, match=WEIGHTS) as caught:
        HubSource(["team"], hub.url, cache).fetch("hf://team/adapter", staging)
    assert caught.value.reason == "SOURCE_NOT_ALLOWED"
    assert contents(staging) == {}
