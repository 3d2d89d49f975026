"""A server that speaks the part of the Hugging Face Hub's API that reading a model needs."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

LFS_BYTES = 1000
"""From this size on, files are stored with LFS: their answers redirect to another place."""
LFS_HOST = "localhost"
HUB_VARIABLES = ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE")
"""Variables by which a program finds more than HF_HOME has; see `HubServer.environment`."""


def git_blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repo:
    """Commits by id, each a folder of files; refs point to them."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    token: str = ""
    is_gated: bool = False

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        body = b"".join(name.encode() + data for name, data in sorted(files.items()))
        commit = hashlib.sha1(body).hexdigest()
        self.commits[commit] = dict(files)
        self.refs[ref] = commit
        return commit


class HubServer:
    def __init__(self, address: str = "127.0.0.1", port: int = 0) -> None:
        """`address` is that by which its clients reach this machine; 0 is any free port."""
        self.repos: dict[str, Repo] = {}
        self.moved: dict[str, str] = {}
        self.requests: list[tuple[str, str]] = []
        self.answered_commit = ""
        self.tampered: dict[str, bytes] = {}
        self.raw_info: bytes | None = None
        self.xet_headers: dict[str, str] = {}
        """Sent with each large file, whose storage the hub's library then asks for by itself."""
        self._objects: dict[str, bytes] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            def do_HEAD(self) -> None:
                hub.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(
            ("127.0.0.1" if address == "127.0.0.1" else "", port), Handler
        )
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://{address}:{self._server.server_port}"
        self.lfs_url = f"http://{LFS_HOST}:{self._server.server_port}"  # another host, as a CDN is

    def environment(self, home: Path) -> dict[str, str]:
        """Returns the variables by which a program uses this hub, with its cache below `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "LOADOUT_HF_REDIRECT_HOSTS": LFS_HOST,
            "NO_PROXY": "127.0.0.1,localhost",
        }

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(handler.path).path)
        self.requests.append((path, handler.headers.get("Authorization", "")))
        if path.startswith("/lfs/"):
            return self._lfs(handler, path.removeprefix("/lfs/"))
        if path.startswith("/xet-token/"):
            return _send(handler, 200, {"X-Xet-Cas-Url": unquote(path.removeprefix("/xet-token/"))})
        api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models" if api else "").strip("/").split("/")
        repo_id, kind, revision = "/".join(parts[:2]), parts[2] if len(parts) > 2 else "", ""
        repo_id = self.moved.get(repo_id, repo_id)
        repo = self.repos.get(repo_id)
        if repo is None:
            return _send(handler, 404, {"X-Error-Code": "RepoNotFound"})
        if repo.token and handler.headers.get("Authorization") != f"Bearer {repo.token}":
            return _send(handler, 401, {"X-Error-Code": "RepoNotFound"})
        if repo.is_gated and not api:
            return _send(handler, 403, {"X-Error-Code": "GatedRepo"})
        rest = "/".join(parts[3:])
        for ref in (*repo.refs, *repo.commits):
            if rest == ref or rest.startswith(f"{ref}/"):
                revision = ref
        commit = repo.refs.get(revision or "main", revision)
        if (kind and not revision) or commit not in repo.commits:
            return _send(handler, 404, {"X-Error-Code": "RevisionNotFound"})
        if api and kind == "tree":
            return self._tree(handler, repo.commits[commit])
        if api:
            return self._info(handler, repo_id, commit, repo.commits[commit])
        name = rest.removeprefix(revision).strip("/")
        return self._file(handler, commit, repo.commits[commit].get(name), name)

    def _info(
        self, handler: BaseHTTPRequestHandler, repo_id: str, commit: str, files: dict[str, bytes]
    ) -> None:
        siblings = [
            {
                "rfilename": name,
                "size": len(data),
                "blobId": git_blob_id(data),
                **({"lfs": _lfs_info(data)} if len(data) >= LFS_BYTES else {}),
            }
            for name, data in files.items()
        ]
        body = {"id": repo_id, "modelId": repo_id, "sha": commit, "siblings": siblings}
        text = json.dumps(body).encode() if self.raw_info is None else self.raw_info
        _send(handler, 200, {"Content-Type": "application/json"}, text)

    def _tree(self, handler: BaseHTTPRequestHandler, files: dict[str, bytes]) -> None:
        entries = [
            {
                "type": "file",
                "path": name,
                "size": len(data),
                "oid": git_blob_id(data),
                **({"lfs": _lfs_entry(data)} if len(data) >= LFS_BYTES else {}),
            }
            for name, data in files.items()
        ]
        _send(handler, 200, {"Content-Type": "application/json"}, json.dumps(entries).encode())

    def _file(
        self, handler: BaseHTTPRequestHandler, commit: str, data: bytes | None, name: str
    ) -> None:
        if data is None:
            return _send(handler, 404, {"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": self.answered_commit or commit}
        if len(data) < LFS_BYTES:
            headers["ETag"] = f'"{git_blob_id(data)}"'
            return _send_range(handler, headers, self.tampered.get(name, data))
        sha256 = hashlib.sha256(data).hexdigest()
        headers |= {"X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(len(data))}
        headers |= self.xet_headers
        self._objects[sha256] = self.tampered.get(name, data)
        return _send(handler, 302, {**headers, "Location": f"{self.lfs_url}/lfs/{sha256}"})

    def _lfs(self, handler: BaseHTTPRequestHandler, sha256: str) -> None:
        _send_range(handler, {"ETag": f'"{sha256}"'}, self._objects[sha256])


def _lfs_info(data: bytes) -> dict[str, object]:
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 130}


def _lfs_entry(data: bytes) -> dict[str, object]:
    return {"size": len(data), "oid": hashlib.sha256(data).hexdigest(), "pointerSize": 130}


def _send_range(handler: BaseHTTPRequestHandler, headers: dict[str, str], data: bytes) -> None:
    asked = handler.headers.get("Range", "")
    if not asked:
        return _send(handler, 200, headers, data)
    start = int(asked.removeprefix("bytes=").partition("-")[0])
    headers = {**headers, "Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
    return _send(handler, 206, headers, data[start:])


def _send(
    handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes = b""
) -> None:
    handler.send_response(status)
    for key, value in headers.items():
        handler.send_header(key, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)
