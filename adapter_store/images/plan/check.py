"""A store's verdict on a folder, without a store: the changes of the adapter, and whether a server
can serve it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from adapter_store.checkpoint.features import features_of
from adapter_store.checkpoint.formats.select import find_format
from adapter_store.checkpoint.open import Checkpoint, open_checkpoint
from adapter_store.checkpoint.reading.files import CheckpointLimits, copy_texts
from adapter_store.checkpoint.text_files import AdapterText, read_text
from adapter_store.core import Announcement, ServerLimits
from adapter_store.errors import IncompatibleAdapter, InvalidAdapter, LimitExceeded
from adapter_store.images.plan.announcement import content_of
from adapter_store.images.plan.layout import validate
from adapter_store.images.plan.plan import IMAGE_FORMATS, ImagePlan, plan_image
from contract.folders import GivenFolder
from contract.images.layouts import Layout
from servicekit.errors import ServiceError


@dataclass(frozen=True, slots=True)
class ModuleContent:
    """The weights of an adapter, or its image, for one module: `kinds` are SegmentKind's values."""

    name: str
    kinds: tuple[str, ...]
    rank: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why something is refused: `subject` is the file, tensor, module or key of the config."""

    subject: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class ServerReport:
    """The verdict of a server of one layout on an adapter. `refusals` say why it does not serve it;
    none: it does, but for the modules that are `unused`: no request passes through them."""

    base_model: str
    max_rank: int
    image_bytes: int
    targets: tuple[ModuleContent, ...]
    refusals: tuple[Refusal, ...]
    unused: tuple[str, ...] = ()
    note: str = ""
    """See ServerLimits.note."""


@dataclass(frozen=True, slots=True)
class Report:
    """An adapter that would be registered, or with `refusal` one that would be refused. `features`
    are values of Feature, `saved_by` is the format of its files."""

    saved_by: str
    base_model: str = ""
    digest: str = ""
    source_bytes: int = 0
    tokenizer_digest: str = ""
    chat_template_digest: str = ""
    rank: int = 0
    invocation_tokens: tuple[int, ...] = ()
    ignored_config_keys: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    modules: tuple[ModuleContent, ...] = ()
    server: ServerReport | None = None
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Server:
    """A server, as it registers itself."""

    layout: Layout
    announcement: Announcement


def check_folder(
    folder: Path, limits: CheckpointLimits | None = None, server: Server | None = None
) -> Report:
    """Returns the verdict of a store, and of a server if one is given, on an adapter.

    Raises InvalidArgument for a layout that is none, OSError for a folder that cannot be read.
    """
    limits = limits or CheckpointLimits()
    with GivenFolder(folder) as given:
        saved_by = find_format(given).value
        try:
            text = _read_text(given)
            checkpoint = open_checkpoint(given, limits)
            text = text.beside(checkpoint)
            features = features_of(checkpoint, limits)
        except (InvalidAdapter, LimitExceeded) as error:
            return Report(saved_by, refusal=_refusal(error))
        checked = None if server is None else _check_server(checkpoint, server)
    return Report(
        saved_by,
        checkpoint.base_model,
        checkpoint.digest,
        checkpoint.source_bytes,
        tokenizer_digest=text.tokenizer_digest,
        chat_template_digest=text.chat_template_digest,
        rank=checkpoint.rank,
        invocation_tokens=checkpoint.invocation_tokens,
        ignored_config_keys=checkpoint.config.ignored_keys,
        warnings=(*checkpoint.warnings, *text.warnings),
        features=tuple(feature.value for feature in features),
        modules=tuple(_modules(checkpoint)),
        server=checked,
    )


def _read_text(folder: GivenFolder) -> AdapterText:
    """Returns the contents of the adapter's text files, of copies: a process reads them by path."""
    with TemporaryDirectory(prefix="loadout-") as copies:
        names = copy_texts(folder, Path(copies))
        return read_text(Path(copies), names) if names else AdapterText()


def _modules(checkpoint: Checkpoint) -> Iterable[ModuleContent]:
    for changes in checkpoint.changes:
        kinds = sorted(kind.value for kind in changes.kinds)
        num_bytes = sum(record.length_bytes for _, record in changes.records())
        yield ModuleContent(changes.name, tuple(kinds), changes.rank, num_bytes)


def _check_server(checkpoint: Checkpoint, server: Server) -> ServerReport:
    announced = server.announcement
    layout = dataclasses.replace(server.layout, image_format=max(IMAGE_FORMATS))
    validate(layout)
    said = (layout.base_model, announced.max_rank)
    limits = ServerLimits(
        "",
        announced.max_rank,
        segment_kinds=announced.segment_kinds,
        lora_targets=announced.lora_targets,
        max_added_tokens=announced.max_added_tokens,
        applies_invocation_tokens=announced.applies_invocation_tokens,
        weight_form=announced.weight_form,
        part=announced.part,
    )
    try:
        plan = plan_image(checkpoint, layout)
    except IncompatibleAdapter as error:
        return ServerReport(*said, 0, (), (_refusal(error),))
    found = limits.refusals(checkpoint, content_of(plan, layout))
    refusals = tuple(Refusal("", "NOT_APPLIED", why) for why in found)
    unused = tuple(module for _, module in plan.unused)
    note = "" if refusals else limits.note(checkpoint.base_model)
    return ServerReport(*said, plan.total_bytes, _targets(plan, layout), refusals, unused, note)


def _targets(plan: ImagePlan, layout: Layout) -> tuple[ModuleContent, ...]:
    """Returns the image's contents for each target, in order; shared bytes count where they lie
    first."""
    found: dict[int, list[int]] = {}
    for index, segment in enumerate(plan.segments):
        found.setdefault(segment.target, []).append(index)
    end, result = 0, []
    for target, indices in found.items():
        segments = [plan.segments[index] for index in indices]
        num_bytes = 0
        for segment in segments:
            if segment.offset >= end:
                num_bytes += segment.length_bytes
                end = segment.offset + segment.length_bytes
        kinds = tuple(segment.kind.value for segment in segments)
        rank = max(segment.rank for segment in segments)
        result.append(ModuleContent(layout.targets[target].name, kinds, rank, num_bytes))
    return tuple(result)


def _refusal(error: ServiceError) -> Refusal:
    return Refusal(error.subject, error.reason, str(error))
