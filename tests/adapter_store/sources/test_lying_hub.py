"""A hub that lies about sizes, commits, contents and where they are: nothing of it is kept."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from huggingface_hub import constants

from adapter_store.errors import InvalidAdapter, LimitExceeded, SourceUnavailable
from adapter_store.sources.hub import MAX_INFO_BYTES, HubSource
from adapter_store.sources.transfer import RetryPolicy
from servicekit.errors import FailedPrecondition, NotFound
from tests.support.servers.hub_server import git_blob_id

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
COMMIT = "c" * 40
FILES = {CONFIG: b"{}", WEIGHTS: bytes(range(256)) * 8}
QUICK = RetryPolicy(attempts=2, first_seconds=0.01, max_seconds=0.02)
URI = "hf://team/adapter"


def info(**changes: Any) -> dict[str, Any]:
    siblings = [
        {"rfilename": name, "size": len(data), "blobId": git_blob_id(data)}
        for name, data in FILES.items()
    ]
    return {"id": "team/adapter", "sha": COMMIT, "siblings": siblings, **changes}


def with_weights(**changes: Any) -> dict[str, Any]:
    """What a hub says, with other words about the weights."""
    found = info()
    found["siblings"][1] |= changes
    return found


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LyingHub

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        with suppress(OSError):
            if "/api/" in self.path:
                self.server.say_info(self)
            elif self.path.endswith(WEIGHTS):
                self.server.say_weights(self)
            else:
                self.send(FILES[CONFIG])

    def send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        sent = {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **headers}
        for key, value in sent.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def send_for_ever(self, **headers: str) -> None:
        """Sends chunks until the client leaves."""
        self.send_response(200)
        for key, value in {"X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        block = b"[" * 65536
        while True:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(block), block))
            self.server.num_sent_bytes += len(block)

    def log_message(self, *_: object) -> None:
        pass


class LyingHub(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that has enough leaves."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[str] = []
        self.num_sent_bytes = 0
        self.say_info: Callable[[Handler], None] = answer(info())
        self.say_weights: Callable[[Handler], None] = lambda it: it.send(FILES[WEIGHTS])


def answer(said: object) -> Callable[[Handler], None]:
    body = said if isinstance(said, bytes) else json.dumps(said).encode()
    return lambda handler: handler.send(body)


def redirect(to: str) -> Callable[[Handler], None]:
    return lambda handler: handler.send(b"", 302, Location=to)


@pytest.fixture(autouse=True)
def chain(monkeypatch, tmp_path) -> None:
    """The hub's own chain finds nothing of this machine's."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def hub() -> Iterator[LyingHub]:
    hub = LyingHub()
    thread = threading.Thread(target=hub.serve_forever, args=(0.05,))
    thread.start()
    yield hub
    hub.shutdown()
    thread.join()
    hub.server_close()


@pytest.fixture
def fetch(hub, staging):
    """fetch(): the files' contents by name."""

    def fetch() -> dict[str, bytes]:
        assert HubSource(["team"], hub.url, retry=QUICK).fetch(URI, staging) == COMMIT
        return {path.name: path.read_bytes() for path in staging.folder.iterdir()}

    return fetch


def test_an_honest_answer_is_taken(fetch):
    assert fetch() == FILES


@pytest.mark.parametrize(
    ("said", "error", "text"),
    [
        (with_weights(size=10), SourceUnavailable, "has 2048 bytes, but its commit names 10"),
        (with_weights(size=4096), SourceUnavailable, "has 2048 bytes, but its commit names 4096"),
        (with_weights(size=1 << 62), LimitExceeded, "limit"),
        (with_weights(size=-1), InvalidAdapter, "is missing"),
        (with_weights(size=True), InvalidAdapter, "is missing"),
        (with_weights(size="2048"), InvalidAdapter, "is missing"),
        (with_weights(size=2048.0), InvalidAdapter, "is missing"),
        (with_weights(blobId="0" * 40), SourceUnavailable, "is not the file that commit"),
        (with_weights(lfs={"sha256": "0" * 64}), SourceUnavailable, "is not the file that commit"),
        (with_weights(lfs={"sha256": ["x"]}), SourceUnavailable, "is not the file that commit"),
        (with_weights(rfilename="../" + WEIGHTS), InvalidAdapter, "is missing"),
        (with_weights(rfilename="/etc/passwd"), InvalidAdapter, "is missing"),
        (info(siblings=[None, 1, "x", {}]), InvalidAdapter, "is missing"),
        (info(siblings={"a": 1}), InvalidAdapter, "is missing"),
        (info(sha="main"), SourceUnavailable, "names no commit"),
        (info(sha="../" * 13 + "x"), SourceUnavailable, "names no commit"),
        (info(sha=[COMMIT]), SourceUnavailable, "names no commit"),
        (info(id="other/adapter"), NotFound, "has moved to 'other/adapter'"),
        (info(id=["team/adapter"]), NotFound, "has moved"),
        (b'{"id": ' + b"[" * 100_000, SourceUnavailable, "hub's API"),
        (b'{"id": 1, "id": 2}', SourceUnavailable, "hub's API"),
        (b"\xff{}", SourceUnavailable, "hub's API"),
        (gzip.compress(json.dumps(info()).encode()), SourceUnavailable, "hub's API"),
    ],
)
def test_lies_about_a_commit_are_refused(hub, fetch, staging, said, error, text):
    hub.say_info = answer(said)
    with pytest.raises(error, match=text):
        fetch()
    assert WEIGHTS not in {file.name for file in staging.files}


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (lambda it: it.send(FILES[WEIGHTS], X_Repo_Commit="d" * 40), "another commit"),
        (lambda it: it.send(FILES[WEIGHTS][::-1]), "is not the file that commit"),
        (lambda it: it.send(FILES[WEIGHTS][:-1], Content_Length="2048"), "cannot be read now"),
        (lambda it: it.send(FILES[WEIGHTS], Content_Length="-1"), "cannot be read now|bytes"),
        (lambda it: it.send_for_ever(), "has  bytes"),
        (lambda it: it.send_for_ever(Content_Length="2048"), "is longer than the 2048 bytes"),
        (lambda it: it.send(gzip.compress(FILES[WEIGHTS]), Content_Encoding="gzip"), "bytes"),
        (redirect(f"/team/adapter/resolve/{COMMIT}/{WEIGHTS}"), "cannot be read now"),
        (redirect("http://[::1"), "cannot be read now"),
        (redirect(f"/team/adapter/resolve/{COMMIT}/{CONFIG}"), "has 2 bytes"),
    ],
)
def test_lies_about_a_file_are_refused(hub, fetch, staging, said, text):
    hub.say_weights = said
    with pytest.raises(SourceUnavailable, match=text):
        fetch()
    assert WEIGHTS not in {file.name for file in staging.files}


def test_a_hub_that_sends_round_in_circles_is_left(hub, fetch):
    hub.say_info = redirect("/api/again")
    with pytest.raises(SourceUnavailable, match="cannot be read now"):
        fetch()
    assert len(hub.requests) <= 2 * 25


def test_an_endless_list_of_files_is_not_read(hub, fetch, staging):
    hub.say_info = lambda it: it.send_for_ever()
    with pytest.raises(LimitExceeded, match="list of its files"):
        fetch()
    # What is more has been sent, but lies in the buffers of the connection.
    assert staging.progress_bytes <= MAX_INFO_BYTES + (1 << 20)
    assert hub.num_sent_bytes <= MAX_INFO_BYTES + (32 << 20)


def test_a_commit_of_many_files_is_read(hub, fetch):
    said = info()
    digest = hashlib.sha1(b"").hexdigest()
    said["siblings"] += [
        {"rfilename": f"checkpoint-{i}/x", "size": i, "blobId": digest} for i in range(20_000)
    ]
    hub.say_info = answer(said)
    assert fetch() == FILES


@pytest.mark.parametrize(
    "to",
    [
        *("http://127.0.0.1:9/", "http://localhost:9/", "http://hf.co.test:9/", "http://10.0.0.1/"),
        *("http://huggingface.co@127.0.0.1:9/hf.co", "file:///etc/passwd", "ftp://127.0.0.1/"),
    ],
)
@pytest.mark.parametrize("what", ["say_info", "say_weights"])
def test_other_hosts_are_asked_nothing(hub, fetch, to, what):
    """By their names or addresses, as the hub's own host at another port, and as no host at all."""
    setattr(hub, what, redirect(to))
    with pytest.raises(FailedPrecondition, match="not in its --hf-redirect-hosts") as caught:
        fetch()
    assert caught.value.reason == "SOURCE_NOT_ALLOWED"
