"""Registers an adapter: fetches, checks, stores it as a blob, records it. Blocking and durable."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

from adapter_store.blobs.local import Blobs
from adapter_store.blobs.volume import Volume, reporting_full
from adapter_store.catalog.blobs import BlobRecords
from adapter_store.catalog.names import Names
from adapter_store.catalog.tables.filters import check_labels
from adapter_store.catalog.tables.version_rows import NewVersion
from adapter_store.checkpoint.open import Checkpoint, open_checkpoint
from adapter_store.checkpoint.reading.files import CheckpointLimits
from adapter_store.checkpoint.reading.memory_files import MemoryFolder
from adapter_store.checkpoint.reading.recently_verified import VerifiedCheckpoints
from adapter_store.checkpoint.text_files import UNNAMED, AdapterText, TextReader
from adapter_store.checkpoint.unpickle import convert_pickle
from adapter_store.core import BaseModelChoice, Quota, Recorded
from adapter_store.errors import BlobLost, CatalogUnavailable, Conflict, CorruptData, InvalidAdapter
from adapter_store.metrics.registry import Metrics
from adapter_store.registration.base_model import choose_base_model
from adapter_store.registration.signatures import Signature, check_signature, verify_signature
from adapter_store.registration.tenant_policy import StorePolicyFile
from adapter_store.sources import Sources
from adapter_store.sources.limits import FetchLimits, StagedBytes, Stop
from adapter_store.sources.staging import Staging
from adapter_store.sources.transfer import FetchRunner
from adapter_store.sources.upload import UPLOAD_URI, FileChunk, Upload
from contract.adapter_files import MODEL_CONFIG, PICKLE_FILE, is_text_file
from servicekit.auth.principal import tenant_account
from servicekit.errors import FailedPrecondition, InvalidArgument, NotFound, ServiceError
from servicekit.refs import AdapterName, AdapterRef
from servicekit.shares import Shares
from servicekit.telemetry.spans import child_span

logger = logging.getLogger(__name__)

MAX_BASE_MODEL_CHARS = 512
MAX_DESCRIPTION_CHARS = 4096
MAX_TRIES = 3
UNSIGNED_LABELS = (
    f"{MODEL_CONFIG} is not read, as no signature covers it and the tenant requires signatures: "
    f"{UNNAMED}"
)


@dataclass(frozen=True, slots=True)
class Registration:
    """A caller's request, without the files. Empty strings are not given; `default_base_model` is
    for an adapter of which nothing else says its base model; `keep` is how many versions may stay,
    0 as many as the tenant may have. An `ephemeral` one is kept in memory; with `ttl_seconds` it is
    deleted so long after it."""

    name: AdapterName
    base_model: str = ""
    default_base_model: str = ""
    expected_digest: str = ""
    if_current_digest: str = ""
    pinned: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    description: str = ""
    created_by: str = ""
    signature: Signature | None = None
    keep: int = 0
    ephemeral: bool = False
    ttl_seconds: int = 0


class Registrar:
    """Thread-safe. Setting `stopping` ends fetches with Draining. Data being received takes its
    tenant's share of `staged_bytes`; ephemeral data takes a share of `ephemeral_bytes`, and keeps
    it."""

    def __init__(
        self,
        names: Names,
        records: BlobRecords,
        blobs: Blobs,
        volume: Volume,
        verified: VerifiedCheckpoints,
        sources: Sources,
        metrics: Metrics,
        fetch_limits: FetchLimits,
        checkpoint_limits: CheckpointLimits,
        policies: StorePolicyFile,
        stopping: threading.Event,
        fetches: FetchRunner,
        staged_bytes: Shares,
        ephemeral_bytes: Shares,
        make_room: Callable[[str | None], object],
    ) -> None:
        self._names = names
        self._records = records
        self._blobs = blobs
        self._volume = volume
        self._verified = verified
        self._sources = sources
        self._metrics = metrics
        self._fetch_limits = fetch_limits
        self._checkpoint_limits = checkpoint_limits
        self._policies = policies
        self._stopping = stopping
        self._fetches = fetches
        self._staged_bytes = staged_bytes
        self._ephemeral_bytes = ephemeral_bytes
        self._make_room = make_room
        self._texts = TextReader(fetches.running.share)

    @property
    def running_fetches(self) -> Shares:
        """The place of connections to sources."""
        return self._fetches.running

    def check(self, request: Registration) -> None:
        """Makes the checks that are possible before anything is fetched.

        Raises InvalidArgument, Conflict, QuotaExceeded for a tenant whose quota is used up,
        DiskFull, and as check_signature.
        """
        check_labels(request.labels)
        if request.ephemeral and request.pinned:
            raise InvalidArgument(
                "ephemeral: a pinned adapter must last: register it without pin or without "
                "ephemeral",
                subject="ephemeral",
            )
        _check_description(request.description)
        _check_base_model(request.base_model, "base_model")
        _check_base_model(request.default_base_model, "default_base_model")
        if request.expected_digest:
            self._verify_signature(request, request.expected_digest)
        else:
            check_signature(self._policies.policy, request.name.tenant, request.signature)
        if request.if_current_digest:
            try:
                current = self._names.get(AdapterRef(name=request.name))[0].digest
            except NotFound:
                current = "nothing"
            if current != request.if_current_digest:
                raise Conflict(
                    f"if_current_digest: {request.name} points to {current}",
                    subject="if_current_digest",
                )
        self._names.check_capacity(request.name, request.expected_digest, self._quota(request))
        self._volume.check_space(0)

    def register(
        self, request: Registration, source_uri: str, caller_gone: threading.Event | None = None
    ) -> Recorded:
        """Fetches, checks and records.

        Raises as Source.fetch, FetchRunner.run, open_checkpoint and choose_base_model,
        FailedPrecondition if the content is not the expected or the signed one, Conflict,
        QuotaExceeded, ShareExceeded, and CallerGone if `caller_gone` is set before the end of the
        fetch.
        """
        staging = self._stage(request, caller_gone)
        try:
            with child_span("fetch") as span, reporting_full():
                revision = self._fetches.run(
                    tenant_account(request.name.tenant),
                    lambda: self._sources.fetch(source_uri, staging),
                    staging,
                )
                if span is not None:
                    span.set_attributes(
                        bytes=staging.total_bytes, scheme=source_uri.partition(":")[0]
                    )
            return self._record(request, staging, source_uri, revision)
        finally:
            self._unstage(staging)

    def open_upload(self, request: Registration) -> Upload:
        """Opens an upload to write chunks to; then call `finish_upload` or `abandon_upload`."""
        return Upload(self._stage(request))

    def write_upload(self, upload: Upload, chunk: FileChunk) -> None:
        with reporting_full():
            upload.write(chunk)

    def finish_upload(self, request: Registration, upload: Upload) -> Recorded:
        """Checks and records the uploaded files, as `register`."""
        try:
            with reporting_full():
                upload.finish()
            return self._record(request, upload.staging, UPLOAD_URI)
        finally:
            self.abandon_upload(upload)

    def abandon_upload(self, upload: Upload) -> None:
        upload.abandon()
        self._unstage(upload.staging)

    def _verify_signature(self, request: Registration, digest: str) -> str:
        """Verifies by the policy of this moment. See verify_signature."""
        policy, tenant = self._policies.policy, request.name.tenant
        return verify_signature(policy, tenant, request.signature, digest)

    def _quota(self, request: Registration) -> Quota:
        return self._policies.policy.tenant(request.name.tenant).quota

    def _stage(self, request: Registration, caller_gone: threading.Event | None = None) -> Staging:
        stop = Stop(self._stopping, caller_gone or threading.Event())
        stop.check()
        account = tenant_account(request.name.tenant)
        if request.ephemeral and self._blobs.has_memory:
            # Stored bytes count, too: the catalog compares that with the quota.
            of_tenant = partial(self._make_room, request.name.tenant)
            make_room = of_tenant, partial(self._make_room, None)
            staged = StagedBytes(self._ephemeral_bytes, account, make_room=make_room)
            return Staging(self._blobs.stage(), self._fetch_limits, stop, staged, in_memory=True)
        staged = StagedBytes(self._staged_bytes, account, self._quota(request).max_bytes)
        check_space = self._volume.check_space
        return Staging(self._blobs.stage(), self._fetch_limits, stop, staged, check_space)

    def _unstage(self, staging: Staging) -> None:
        self._metrics.fetched_bytes.inc(staging.total_bytes)
        staging.remove()

    def _record(
        self, request: Registration, staging: Staging, source_uri: str, source_revision: str = ""
    ) -> Recorded:
        with child_span("check"):
            text = self._read_text(request, staging)
            checkpoint = self._open(staging)
            text = text.beside(checkpoint)
            known = self._names.known_base_models(request.name)
            base = choose_base_model(
                request.base_model,
                checkpoint.base_model,
                known,
                default=request.default_base_model,
            )
            request = replace(request, base_model=base.name)
            new = _new_version(request, checkpoint, staging, source_uri, source_revision)
            new = replace(
                new,
                tokenizer_digest=text.tokenizer_digest,
                chat_template_digest=text.chat_template_digest,
                texts=text.contents,
                class_labels=text.class_labels,
            )
            if request.signature is not None:
                signed_by = self._verify_signature(request, new.digest)
                new = replace(new, signed_by=signed_by, signature=request.signature.value)
        with child_span("commit"), reporting_full():
            staging.work.wait_durable()  # they were being written to the disk during the check
            with self._blobs.guard(new.digest):
                recorded = self._commit(request, new, checkpoint)
        recorded = recorded._replace(
            base_model=base,
            ignored_config_keys=checkpoint.config.ignored_keys,
            warnings=(*checkpoint.warnings, *text.warnings),
        )
        _log_registered(request, new, base, recorded)
        return recorded

    def _read_text(self, request: Registration, staging: Staging) -> AdapterText:
        """Returns the contents of the adapter's text files, which are removed. A signature is of
        the weights alone: where one is required, the base model's counts, and labels have no
        names."""
        text, tenant = AdapterText(), request.name.tenant
        names = [file.name for file in staging.files if is_text_file(file.name)]
        if not names:
            return text
        if self._policies.policy.tenant(tenant).require_signature:
            if MODEL_CONFIG in names:
                text = AdapterText(label_warning=UNSIGNED_LABELS)
        else:
            text = self._texts.read(
                staging.folder, staging.files, tenant_account(tenant), staging.check_cancelled
            )
        staging.work.wait_durable()  # a file that is removed must not be missed by that
        staging.drop_texts()
        return text

    def _open(self, staging: Staging) -> Checkpoint:
        if staging.allows_pickle:
            with reporting_full():
                staging.work.wait_durable()  # a file that is replaced must not be missed by that
                converted = convert_pickle(
                    staging.folder, self._checkpoint_limits, check_cancelled=staging.check_cancelled
                )
            if converted is not None:
                staging.replace_file(PICKLE_FILE, converted)
        return open_checkpoint(staging.contents, self._checkpoint_limits)

    def _commit(self, request: Registration, new: NewVersion, staged: Checkpoint) -> Recorded:
        """Stores the folder as the blob, and points the name to it. Needs the blob's guard."""
        folder = staged.stored_folder
        for _ in range(MAX_TRIES):
            existing = _ExistingBlob(new.digest, self._checkpoint_limits)
            stored = self._blobs.put(folder, new.digest, new.files, existing.is_intact)
            try:
                recorded = self._point(request, replace(new, blob=stored))
            except BlobLost:  # collected by another replica, between the two steps
                self._blobs.finish_put(new.digest, stored, folder)
                continue
            except CatalogUnavailable:  # it may be recorded, or not
                self._blobs.abandon_put(stored)
                raise
            except ServiceError:
                self._blobs.finish_put(new.digest, stored, folder)
                raise
            self._blobs.finish_put(new.digest, stored, folder)
            self._mark_recorded()
            verified = existing.checkpoint
            is_blob = folder.is_kept if isinstance(folder, MemoryFolder) else not folder.is_dir()
            if is_blob:
                verified = replace(staged, folder=self._blobs.path(new.digest))
            if verified is not None:
                self._verified.put(verified)
            return recorded
        raise BlobLost(f"{new.digest} was collected while it was registered; try again")

    def _mark_recorded(self) -> None:
        """From the first record on a store without its catalog must not start anew."""
        try:
            self._blobs.mark_recorded()
        except OSError as error:  # the collector tries again
            logger.warning("not noted that the catalog has records", extra={"why": str(error)})

    def _point(self, request: Registration, new: NewVersion) -> Recorded:
        """Points the name to the stored blob, which is removed if that is refused."""
        limits = self._policies.policy.tenant(request.name.tenant)
        keep = limits.keep(request.keep)
        try:
            return self._names.register(new, request.if_current_digest, limits.quota, keep)
        except CatalogUnavailable:
            raise
        except ServiceError:
            place = self._records.take(new.digest)
            if place is not None:
                self._blobs.remove(new.digest, place)
            raise


@dataclass(slots=True)
class _ExistingBlob:
    """A blob that is stored already; `checkpoint` is the one that `is_intact` opened."""

    digest: str
    limits: CheckpointLimits
    checkpoint: Checkpoint | None = None

    def is_intact(self, path: Path) -> bool:
        """Returns whether the files have the digest."""
        try:
            opened = open_checkpoint(path, replace(self.limits, allowed_config_keys=None))
        except (InvalidAdapter, CorruptData):
            return False
        if opened.digest == self.digest:
            self.checkpoint = opened
        return opened.digest == self.digest


def _check_base_model(name: str, field: str) -> None:
    if len(name) > MAX_BASE_MODEL_CHARS or not name.isprintable():
        raise InvalidArgument(
            f"{field}: longer than {MAX_BASE_MODEL_CHARS} or not printable", subject=field
        )


def _check_description(text: str) -> None:
    if len(text) > MAX_DESCRIPTION_CHARS or "\0" in text:
        raise InvalidArgument(
            f"description: longer than {MAX_DESCRIPTION_CHARS} characters, or contains a NUL",
            subject="description",
        )


def _log_registered(
    request: Registration, new: NewVersion, base: BaseModelChoice, recorded: Recorded
) -> None:
    record = recorded.record
    logger.info(
        "adapter registered",
        extra={
            "adapter": f"{record.name}@{record.version}",
            "digest": record.digest,
            "revision": recorded.revision,
            "source_uri": new.source_uri,
            "source_revision": new.source_revision,
            "base_model": base.name,
            "base_model_source": base.source.value,
            "tokenizer_digest": record.tokenizer_digest,
            "chat_template_digest": record.chat_template_digest,
            "class_labels": len(record.class_labels),
            "deleted_versions": recorded.deleted_versions,
            "ignored_config_keys": recorded.ignored_config_keys,
            "warnings": recorded.warnings,
            "ephemeral": request.ephemeral,
            "ttl_seconds": request.ttl_seconds,
        },
    )


def _new_version(
    request: Registration,
    checkpoint: Checkpoint,
    staging: Staging,
    source_uri: str,
    source_revision: str,
) -> NewVersion:
    if request.expected_digest and checkpoint.digest != request.expected_digest:
        raise FailedPrecondition(
            f"expected_digest: the content has digest {checkpoint.digest}",
            subject="expected_digest",
            reason="DIGEST_MISMATCH",
        )
    return NewVersion(
        name=request.name,
        digest=checkpoint.digest,
        base_model=request.base_model,
        source_uri=source_uri,
        rank=checkpoint.rank,
        targets=checkpoint.module_names,
        source_bytes=checkpoint.source_bytes,
        pinned=request.pinned,
        labels=request.labels,
        description=request.description,
        created_by=request.created_by,
        source_revision=source_revision,
        config_base_model=checkpoint.base_model,
        files=staging.files,
        segment_kinds=checkpoint.segment_kinds,
        invocation_tokens=checkpoint.invocation_tokens,
        ephemeral=request.ephemeral,
        ttl=timedelta(seconds=request.ttl_seconds),
    )
