"""Registering an adapter: fetch, check, keep as a blob, record. Blocking; durable in the end."""

from __future__ import annotations

import errno
import logging
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from adapter_store.blobs.local import Blobs
from adapter_store.catalog.catalog import Catalog
from adapter_store.catalog.filters import check_labels
from adapter_store.catalog.rows import NewVersion
from adapter_store.checkpoint.files import PICKLE_FILE, CheckpointLimits
from adapter_store.checkpoint.open import Checkpoint, open_checkpoint
from adapter_store.checkpoint.peft_config import names_local_path
from adapter_store.checkpoint.unpickle import convert_pickle
from adapter_store.checkpoint.verified import VerifiedCheckpoints
from adapter_store.core import AdapterRecord, Quota
from adapter_store.errors import (
    BlobLost,
    CatalogUnavailable,
    Conflict,
    CorruptData,
    InvalidAdapter,
    LimitExceeded,
)
from adapter_store.metrics.metrics import Metrics
from adapter_store.registration.policy import StorePolicyFile
from adapter_store.registration.signatures import Signature, check_signature, verify_signature
from adapter_store.sources import Sources
from adapter_store.sources.staging import FetchLimits, Staging
from adapter_store.sources.upload import UPLOAD_URI, FileChunk, Upload
from servicekit.errors import FailedPrecondition, InvalidArgument, NotFound, ServiceError
from servicekit.refs import AdapterName, AdapterRef
from servicekit.telemetry.spans import child_span

logger = logging.getLogger(__name__)

MAX_BASE_MODEL_CHARS = 512
MAX_DESCRIPTION_CHARS = 4096
MAX_TRIES = 3
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True)
class Registration:
    """What a caller asks for, besides the files. Empty strings: not asked for."""

    name: AdapterName
    base_model: str = ""
    expected_digest: str = ""
    if_current_digest: str = ""
    pinned: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    description: str = ""
    created_by: str = ""
    signature: Signature | None = None


class Registrar:
    """Thread-safe. `stopping` ends what is being fetched with Draining."""

    def __init__(
        self,
        catalog: Catalog,
        blobs: Blobs,
        verified: VerifiedCheckpoints,
        sources: Sources,
        metrics: Metrics,
        fetch_limits: FetchLimits,
        checkpoint_limits: CheckpointLimits,
        policies: StorePolicyFile,
        stopping: threading.Event,
    ) -> None:
        self._catalog = catalog
        self._blobs = blobs
        self._verified = verified
        self._sources = sources
        self._metrics = metrics
        self._fetch_limits = fetch_limits
        self._checkpoint_limits = checkpoint_limits
        self._policies = policies
        self._stopping = stopping

    def check(self, asked: Registration) -> None:
        """What can be refused before anything is fetched.

        Raises InvalidArgument, Conflict, QuotaExceeded for a tenant that has no room left, and
        what check_signature raises.
        """
        check_labels(asked.labels)
        _check_description(asked.description)
        if len(asked.base_model) > MAX_BASE_MODEL_CHARS or not asked.base_model.isprintable():
            raise InvalidArgument(
                f"base_model: longer than {MAX_BASE_MODEL_CHARS} or not printable",
                subject="base_model",
            )
        if asked.expected_digest:
            self._verify_signature(asked, asked.expected_digest)
        else:
            check_signature(self._policies.policy, asked.name.tenant, asked.signature)
        if asked.if_current_digest:
            try:
                current = self._catalog.get(AdapterRef(name=asked.name))[0].digest
            except NotFound:
                current = "nothing"
            if current != asked.if_current_digest:
                raise Conflict(
                    f"if_current_digest: {asked.name} points to {current}",
                    subject="if_current_digest",
                )
        self._catalog.check_room(asked.name, asked.expected_digest, self._quota(asked))

    def register(self, asked: Registration, source_uri: str) -> tuple[AdapterRecord, int]:
        """Fetches and records. Gives the record and the revision at which it is current.

        Raises what Source.fetch and open_checkpoint raise, FailedPrecondition if the content is
        not as expected or not what was signed, Conflict, and QuotaExceeded.
        """
        staging = self._stage()
        try:
            with child_span("fetch") as span, _disk_full_translated():
                revision = self._sources.fetch(source_uri, staging)
                if span is not None:
                    span.set_attributes(
                        bytes=staging.total_bytes, scheme=source_uri.partition(":")[0]
                    )
            return self._record(asked, staging, source_uri, revision)
        finally:
            self._unstage(staging)

    def open_upload(self) -> Upload:
        """A place for chunks; then call `finish_upload` or `abandon_upload`."""
        return Upload(self._stage())

    def write_upload(self, upload: Upload, chunk: FileChunk) -> None:
        with _disk_full_translated():
            upload.write(chunk)

    def finish_upload(self, asked: Registration, upload: Upload) -> tuple[AdapterRecord, int]:
        """Records what was uploaded, as `register`."""
        try:
            with _disk_full_translated():
                upload.finish()
            return self._record(asked, upload.staging, UPLOAD_URI)
        finally:
            self.abandon_upload(upload)

    def abandon_upload(self, upload: Upload) -> None:
        upload.abandon()
        self._unstage(upload.staging)

    def _verify_signature(self, asked: Registration, digest: str) -> str:
        """See verify_signature: by the policy as it is at this moment."""
        return verify_signature(self._policies.policy, asked.name.tenant, asked.signature, digest)

    def _quota(self, asked: Registration) -> Quota:
        return self._policies.policy.tenant(asked.name.tenant).quota

    def _stage(self) -> Staging:
        return Staging(self._blobs.stage(), self._fetch_limits, self._stopping)

    def _unstage(self, staging: Staging) -> None:
        self._metrics.fetched_bytes.inc(staging.total_bytes)
        shutil.rmtree(staging.folder, ignore_errors=True)

    def _record(
        self, asked: Registration, staging: Staging, source_uri: str, source_revision: str = ""
    ) -> tuple[AdapterRecord, int]:
        with child_span("check"):
            checkpoint = self._open(staging)
            new = _new_version(asked, checkpoint, staging, source_uri, source_revision)
            if asked.signature is not None:
                signed_by = self._verify_signature(asked, new.digest)
                new = replace(new, signed_by=signed_by, signature=asked.signature.value)
        with child_span("commit"), self._blobs.guard(new.digest), _disk_full_translated():
            record, revision = self._keep(asked, new, checkpoint)
        logger.info(
            "adapter registered",
            extra={
                "adapter": f"{record.name}@{record.version}",
                "digest": record.digest,
                "revision": revision,
                "source_uri": source_uri,
                "source_revision": source_revision,
            },
        )
        return record, revision

    def _open(self, staging: Staging) -> Checkpoint:
        if staging.allows_pickle:
            with _disk_full_translated():
                converted = convert_pickle(
                    staging.folder, self._checkpoint_limits, check_wanted=staging.check_wanted
                )
            if converted is not None:
                staging.replaced(PICKLE_FILE, converted)
        return open_checkpoint(staging.folder, self._checkpoint_limits)

    def _keep(
        self, asked: Registration, new: NewVersion, staged: Checkpoint
    ) -> tuple[AdapterRecord, int]:
        """Makes the folder the blob, and lets the name point to it. Needs its guard."""
        for _ in range(MAX_TRIES):
            intact: list[Checkpoint] = []
            is_intact = partial(self._is_intact, new.digest, intact)
            kept = self._blobs.keep(staged.folder, new.digest, new.files, is_intact)
            try:
                found = self._point(asked, replace(new, blob=kept))
            except BlobLost:  # collected by another replica, between the two steps
                self._blobs.settle(new.digest, kept, staged.folder)
                continue
            except CatalogUnavailable:  # it may be recorded, or not
                self._blobs.leave(kept)
                raise
            except ServiceError:
                self._blobs.settle(new.digest, kept, staged.folder)
                raise
            self._blobs.settle(new.digest, kept, staged.folder)
            if not staged.folder.is_dir():  # it is the blob now
                intact.append(replace(staged, folder=self._blobs.path(new.digest)))
            for checkpoint in intact:
                self._verified.put(checkpoint)
            return found
        raise BlobLost(f"{new.digest} was collected while it was registered; try again")

    def _point(self, asked: Registration, new: NewVersion) -> tuple[AdapterRecord, int]:
        """Lets the name point to the blob just kept; refused, nobody has it."""
        try:
            return self._catalog.register(new, asked.if_current_digest, self._quota(asked))
        except CatalogUnavailable:
            raise
        except ServiceError:
            place = self._catalog.take_blob(new.digest)
            if place is not None:
                self._blobs.remove(new.digest, place)
            raise

    def _is_intact(self, digest: str, intact: list[Checkpoint], path: Path) -> bool:
        """Whether the files are the digest's; puts what was opened into `intact`."""
        try:
            kept = open_checkpoint(path, self._checkpoint_limits)
        except (InvalidAdapter, CorruptData):
            return False
        if kept.digest == digest:
            intact.append(kept)
        return kept.digest == digest


def _check_description(text: str) -> None:
    if len(text) > MAX_DESCRIPTION_CHARS or "\0" in text:
        raise InvalidArgument(
            f"description: longer than {MAX_DESCRIPTION_CHARS} characters, or holds a NUL",
            subject="description",
        )


def _new_version(
    asked: Registration,
    checkpoint: Checkpoint,
    staging: Staging,
    source_uri: str,
    source_revision: str,
) -> NewVersion:
    base_model = asked.base_model or checkpoint.base_model
    if not base_model:
        raise InvalidArgument(
            "base_model: name it, adapter_config.json does not", subject="base_model"
        )
    if not asked.base_model and names_local_path(base_model):
        raise InvalidArgument(
            f"base_model: name it, adapter_config.json has a local path: {base_model[:160]!r}",
            subject="base_model",
        )
    if asked.expected_digest and checkpoint.digest != asked.expected_digest:
        raise FailedPrecondition(
            f"expected_digest: the content has digest {checkpoint.digest}",
            subject="expected_digest",
            reason="DIGEST_MISMATCH",
        )
    return NewVersion(
        name=asked.name,
        digest=checkpoint.digest,
        base_model=base_model,
        source_uri=source_uri,
        rank=checkpoint.rank,
        targets=checkpoint.module_names,
        source_bytes=checkpoint.source_bytes,
        pinned=asked.pinned,
        labels=asked.labels,
        description=asked.description,
        created_by=asked.created_by,
        source_revision=source_revision,
        config_base_model=checkpoint.base_model,
        files=staging.files,
    )


@contextmanager
def _disk_full_translated() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno in _DISK_FULL:
            raise LimitExceeded("this store's disk is full", reason="DISK_FULL") from exc
        raise
