"""hf:// sources: a model repository of the Hugging Face Hub, or of a server that speaks its API; or
one of its folders, where a repository has several adapters.

All files are of one moment: the revision is resolved to a commit first, every file is requested at
that commit, and its content has to have the hash that the commit records for it.

Files are streamed into staging and not through the hub's cache folder, so that they take their
space once and the limits hold while they are read. Offline (HF_HUB_OFFLINE), files are read from
the cache folder; its snapshots are links into its blobs, and no other links are followed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from adapter_store.checkpoint.reading.json import parse_object, show
from adapter_store.errors import InvalidAdapter, LimitExceeded, SourceUnavailable
from adapter_store.sources.local import LocalSource
from adapter_store.sources.staging import StagedFile, Staging
from adapter_store.sources.transfer import (
    CHANGED,
    STEP_BYTES,
    Retry,
    RetryPolicy,
    copy_all,
    in_blocks,
)
from servicekit.errors import FailedPrecondition, InvalidArgument, NotFound, ServiceError
from servicekit.hub_client import REDIRECT_HOSTS, ForeignHost, HubHosts

API_TIMEOUT_S = 15
MAX_INFO_BYTES = 8 << 20
"""The size of a hub's answer about one revision: some fifty thousand files."""
READ_TIMEOUT_S = 30
DEFAULT_REVISION = "main"
PROBED_FILE = "adapter_config.json"
MAX_FOLDERS = 8
"""How deep in a repository an adapter may lie."""

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9_]|[.-](?=[A-Za-z0-9_])){0,94}"
_FOLDER = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_FOLDERS = rf"{_FOLDER}(?:/{_FOLDER}){{0,{MAX_FOLDERS - 1}}}"
_REVISION = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}"
_URI = re.compile(rf"hf://({_PART})/({_PART})(?:/({_FOLDERS}))?(?:@({_REVISION}))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CONFIG_BELOW = re.compile(rf"({_FOLDERS})/{PROBED_FILE}")


@dataclass(frozen=True, slots=True)
class HubPlace:
    """A repository, or the folder `folder` in it, at a revision."""

    organization: str
    name: str
    revision: str
    folder: str = ""

    @property
    def repo_id(self) -> str:
        return f"{self.organization}/{self.name}"

    @property
    def prefix(self) -> str:
        """How the names of its files begin in the repository."""
        return f"{self.folder}/" if self.folder else ""

    def address_below(self, folder: str) -> str:
        """Returns the URI of a folder in it."""
        return str(replace(self, folder=f"{self.prefix}{folder}"))

    def __str__(self) -> str:
        return f"hf://{self.repo_id}{'/' if self.folder else ''}{self.folder}@{self.revision}"


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file as its commit records it: sha256 if it is stored with LFS, else git's blob id."""

    size_bytes: int
    sha256: str
    blob_id: str

    def start_hash(self) -> tuple[Any, str]:
        """Returns a hash to update with the content, and its expected value; "" if the commit does
        not record one."""
        if self.sha256:
            return hashlib.sha256(), self.sha256
        prefix = f"blob {self.size_bytes}\0".encode()
        return hashlib.sha1(prefix, usedforsecurity=False), self.blob_id


class HubSource:
    """Reads repositories of the `allowed` organisations (or users).

    `endpoint` and `cache_dir`: None leaves them to the hub's own chain, as the token always is
    (HF_TOKEN, or the file that `hf auth login` writes).
    """

    def __init__(
        self,
        allowed: Sequence[str],
        endpoint: str | None = None,
        cache_dir: Path | None = None,
        retry: RetryPolicy | None = None,
        redirect_hosts: Sequence[str] = REDIRECT_HOSTS,
    ) -> None:
        self._allowed = frozenset(allowed)
        self._endpoint = endpoint or None
        self._redirect_hosts = redirect_hosts
        self._cache_dir = cache_dir
        self._retry = retry or RetryPolicy()

    def fetch(self, uri: str, staging: Staging) -> str:
        """Fetches the files; the revision is the commit. See Source.fetch. Raises InvalidArgument
        for an organisation that is not allowed, and as `translate_errors`."""
        place = place_of(uri)
        if place.organization not in self._allowed:
            raise InvalidArgument(
                f"source_uri: {place} is not of an organisation that this store may read "
                "(--hf-organizations)",
                subject="source_uri",
                reason="SOURCE_NOT_ALLOWED",
            )
        from huggingface_hub import HfApi, constants

        if constants.HF_HUB_OFFLINE:
            return self._copy_cached(place, staging)
        endpoint = HfApi(endpoint=self._endpoint).endpoint
        with HubHosts(endpoint, self._redirect_hosts).make_client() as client:
            commit, files = self._resolve(client, place, staging)
            below = _adapters_below(files, place)
            names = staging.choose_files(files, str(place), below, place.address_below)
            staging.check_sizes({name: files[name].size_bytes for name in names})

            def copy(name: str) -> None:
                self._copy(client, place, commit, name, files[name], staging)

            copy_all(names, copy, staging)
        return commit

    def _resolve(
        self, client: Any, place: HubPlace, staging: Staging
    ) -> tuple[str, dict[str, HubFile]]:
        """Returns the commit that the revision points to now, and the files in the place's folder
        and below, by their names from there."""
        retry = Retry(self._retry, staging)
        while True:
            try:
                with translate_errors(str(place)):
                    data = self._read_info(client, place, staging)
                    break
            except SourceUnavailable as error:
                retry.failed(error)
        try:
            info = parse_object(data, str(place))
        except InvalidAdapter as exc:
            raise _unavailable(str(place), "its server does not speak the hub's API") from exc
        repo_id, commit = info.get("id"), info.get("sha")
        if repo_id != place.repo_id:  # the hub follows renames, an allow-list must not
            raise NotFound(
                f"source_uri: {place} has moved to {show(repo_id)}",
                subject="source_uri",
                reason="SOURCE_NOT_FOUND",
            )
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise _unavailable(str(place), "its server names no commit")
        return commit, _files_of(info.get("siblings"), place.prefix)

    def _read_info(self, client: Any, place: HubPlace, staging: Staging) -> bytes:
        """Returns the hub's answer about a revision. Raises LimitExceeded if that is too much."""
        from huggingface_hub import HfApi
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        endpoint = HfApi(endpoint=self._endpoint).endpoint
        revision = quote(place.revision, safe="")
        url = f"{endpoint}/api/models/{place.repo_id}/revision/{revision}"
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        options: dict[str, Any] = {"headers": headers, "params": {"blobs": "true"}}
        body = bytearray()
        with client.stream("GET", url, timeout=API_TIMEOUT_S, **options) as answer:
            hf_raise_for_status(answer)
            for step in answer.iter_raw(STEP_BYTES):
                staging.received(len(step))
                body += step
                if len(body) > MAX_INFO_BYTES:
                    raise LimitExceeded(
                        f"source_uri: {place}: the list of its files has more than "
                        f"{MAX_INFO_BYTES} bytes",
                        subject="source_uri",
                    )
        return bytes(body)

    def _copy(
        self,
        client: Any,
        place: HubPlace,
        commit: str,
        name: str,
        expected: HubFile,
        staging: Staging,
    ) -> None:
        """Reads one file, continuing where a connection broke."""
        from huggingface_hub import hf_hub_url

        where = f"{place}: {name}"
        path = place.prefix + name
        url = hf_hub_url(place.repo_id, path, revision=commit, endpoint=self._endpoint)
        digest, expected_digest = expected.start_hash()
        retry = Retry(self._retry, staging)
        with staging.create(name, expected.size_bytes) as file:
            while file.size_bytes < expected.size_bytes:
                before_bytes = file.size_bytes
                try:
                    with translate_errors(where):
                        _read_on(
                            client,
                            url,
                            where,
                            commit,
                            expected.size_bytes,
                            file,
                            digest,
                            staging,
                        )
                except SourceUnavailable as error:
                    if file.size_bytes > before_bytes:
                        retry.progressed()
                    retry.failed(error)
            if expected_digest and digest.hexdigest() != expected_digest:
                raise _changed(where, f"is not the file that commit {commit} records")

    def _copy_cached(self, place: HubPlace, staging: Staging) -> str:
        from huggingface_hub import constants, try_to_load_from_cache

        found = try_to_load_from_cache(
            place.repo_id,
            place.prefix + PROBED_FILE,
            cache_dir=self._cache_dir,
            revision=place.revision,
        )
        if not isinstance(found, str):
            raise NotFound(
                f"source_uri: {place} is not in the cache folder, and this store is offline "
                "(HF_HUB_OFFLINE)",
                subject="source_uri",
                reason="SOURCE_NOT_FOUND",
            )
        folder = Path(found).parent
        snapshot = folder.parents[place.folder.count("/")] if place.folder else folder
        if not _COMMIT.fullmatch(snapshot.name):
            raise _unavailable(str(place), "the cache folder names no commit")
        cache_dir = Path(self._cache_dir or constants.HF_HUB_CACHE)
        repo_dir = cache_dir / f"models--{place.organization}--{place.name}"
        address_of = place.address_below
        LocalSource([repo_dir]).copy_folder(folder, str(place), staging, address_of)
        return snapshot.name


def _read_on(
    client: Any,
    url: str,
    where: str,
    commit: str,
    size_bytes: int,
    file: StagedFile,
    digest: Any,
    staging: Staging,
) -> None:
    """Sends one GET for the missing bytes. Raises SourceUnavailable if not all of them arrive."""
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    start = file.size_bytes
    headers: Mapping[str, str] = {
        **build_hf_headers(),
        "Accept-Encoding": "identity",
        **({"Range": f"bytes={start}-"} if start else {}),
    }
    with client.stream("GET", url, headers=headers, timeout=READ_TIMEOUT_S) as answer:
        hf_raise_for_status(answer)
        for response in (*answer.history, answer):
            if response.headers.get("X-Repo-Commit", commit) != commit:
                raise _changed(where, f"came from another commit than {commit}")
        length = answer.headers.get("Content-Length", "")
        if length != str(size_bytes - start):
            raise _changed(where, f"has {length[:20]} bytes, but its commit names {size_bytes}")
        if start and not answer.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            raise _unavailable(where, "the server did not resume the download where it broke off")
        for data in in_blocks(answer.iter_raw(STEP_BYTES), staging):
            if file.size_bytes + len(data) > size_bytes:
                raise _changed(where, f"is longer than the {size_bytes} bytes in its commit")
            file.write(data)
            digest.update(data)
    if file.size_bytes != size_bytes:
        raise _unavailable(where, f"{file.size_bytes} of {size_bytes} bytes arrived")


def _files_of(siblings: Any, prefix: str) -> dict[str, HubFile]:
    """Returns the files of a commit whose names begin so, by the rest of their names; entries that
    are not as the hub describes a file are none."""
    files = {}
    for each in siblings if isinstance(siblings, list) else ():
        if not isinstance(each, dict):
            continue
        name, size_bytes = each.get("rfilename"), each.get("size")
        if not isinstance(name, str) or not name.startswith(prefix):
            continue
        if type(size_bytes) is int and size_bytes >= 0:
            lfs, blob_id = each.get("lfs"), each.get("blobId")
            sha256 = lfs.get("sha256") if isinstance(lfs, dict) else None
            files[name.removeprefix(prefix)] = HubFile(
                size_bytes, str(sha256 or ""), str(blob_id or "")
            )
    return files


def _adapters_below(files: Iterable[str], place: HubPlace) -> list[str]:
    """Returns the folders in a place that have an adapter's config, and an address."""
    found = (match[1] for match in map(_CONFIG_BELOW.fullmatch, files) if match)
    return [folder for folder in found if _URI.fullmatch(place.address_below(folder))]


def place_of(uri: str) -> HubPlace:
    """Parses hf://org/name[/folder][@revision]; the default revision is main. Raises
    InvalidArgument."""
    match = _URI.fullmatch(uri)
    revision = match[4] or DEFAULT_REVISION if match else ""
    if not match or any(part in ("", ".", "..") for part in revision.split("/")):
        raise InvalidArgument(
            f"source_uri: {uri[:160]!r} is not of the form hf://organisation/name@revision, or "
            f"hf://organisation/name/folder@revision with up to {MAX_FOLDERS} folders",
            subject="source_uri",
        )
    return HubPlace(match[1], match[2], revision, match[3] or "")


@contextmanager
def translate_errors(where: str) -> Iterator[None]:
    """Turns the hub client's errors into ours; `where` is the source that was being read. Messages
    contain no more than the place. Raises FailedPrecondition, NotFound and SourceUnavailable."""
    from huggingface_hub import errors

    # The base class of the errors of the HTTP library underneath, whichever that is.
    transport_error: type[Exception] = errors.HfHubHTTPError.__bases__[0]
    try:
        yield
    except ForeignHost as exc:
        raise FailedPrecondition(
            f"source_uri: this store may not read {where}: {exc}, which is not in its "
            "--hf-redirect-hosts",
            subject="source_uri",
            reason="SOURCE_NOT_ALLOWED",
        ) from exc
    except errors.GatedRepoError as exc:
        raise _denied(where, "it is gated, and access has not been granted to it") from exc
    except errors.DisabledRepoError as exc:
        raise _denied(where, "it is disabled") from exc
    except errors.RepositoryNotFoundError as exc:
        raise _missing(where, "or needs a token that this store does not have") from exc
    except errors.RevisionNotFoundError as exc:
        raise _missing(where, "at this revision") from exc
    except errors.EntryNotFoundError as exc:
        raise _missing(where, "at this commit") from exc
    except errors.HfHubHTTPError as exc:
        raise _from_status(where, exc) from exc
    except transport_error as exc:
        raise _unavailable(where, type(exc).__name__) from exc


def _changed(where: str, how: str) -> SourceUnavailable:
    """Returns the error for content that is not the commit's."""
    return SourceUnavailable(f"source_uri: {where} {how}", subject="source_uri", reason=CHANGED)


def _unavailable(where: str, why: str) -> SourceUnavailable:
    """Returns the error for a failure that may pass."""
    return SourceUnavailable(f"source_uri: {where} cannot be read now: {why}", subject="source_uri")


def _from_status(where: str, error: Any) -> ServiceError:
    status = error.response.status_code
    if status in (401, 403):
        return _denied(where, str(status))
    if status in (404, 410):
        return _missing(where, f"({status})")
    return _unavailable(where, str(status))


def _missing(where: str, how: str) -> NotFound:
    return NotFound(
        f"source_uri: {where} does not exist {how}",
        subject="source_uri",
        reason="SOURCE_NOT_FOUND",
    )


def _denied(where: str, why: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"source_uri: this store may not read {where}: {why}",
        subject="source_uri",
        reason="SOURCE_ACCESS_DENIED",
    )
