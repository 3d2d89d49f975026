"""Fuzzes image format 2: pulled messages, the changes of an adapter to a layout, and layouts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from adapter_store.api import convert as store_convert
from adapter_store.api.bounds import REQUESTS
from adapter_store.checkpoint.formats.readers import READERS
from adapter_store.checkpoint.formats.select import Format
from adapter_store.checkpoint.open import Checkpoint
from adapter_store.checkpoint.reading.files import CheckpointLimits
from adapter_store.checkpoint.reading.json import parse_object
from adapter_store.checkpoint.reading.safetensors import LENGTH_BYTES, read_header
from adapter_store.errors import IncompatibleAdapter, InvalidAdapter
from adapter_store.images.plan.layout import from_text, layout_id, to_text, validate
from adapter_store.images.plan.plan import IMAGE_FORMATS, ImagePlan, plan_image
from contract.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from contract.images.dtypes import DataType
from contract.images.header import ImageChunk, ImageHeader, LayerEnd, PullMessage
from contract.images.layouts import Layout
from contract.images.segment_kinds import SegmentKind
from contract.images.targets import OtherName, Target, TargetKind
from fuzz.refusals import refused
from inference_svc.adapters import layout as served
from inference_svc.adapters.memory.extents import Extent
from inference_svc.adapters.pulls.pull import ImageSink, PullEvent, PullJob, PullOpened
from inference_svc.adapters.pulls.threads import Cancelled, Puller
from inference_svc.errors import AdapterUnusable, CorruptImage, StoreUnavailable
from inference_svc.store.convert import to_pull_message
from servicekit.errors import InvalidArgument

SEPARATOR = b"\xff\xff\xff\xff"
LIMITS = CheckpointLimits(
    max_config_bytes=1 << 16,
    max_header_bytes=1 << 16,
    max_tensors=256,
    max_source_bytes=1 << 40,
    max_rank=512,
    max_match_seconds=0.2,
)
DIGEST, LAYOUT_ID = f"sha256:{'1' * 64}", f"sha256:{'0' * 64}"
MAX_IMAGE_BYTES = 1 << 16
EXPERTS = 4
MAX_ADDED_TOKENS = 3

# --- messages of a pull -------------------------------------------------------------------------


def _served_layout() -> served.ModelLayout:
    layer = "model.layers.0"
    shapes = {"self_attn.q_proj": (4, 8), "self_attn.k_proj": (4, 4)}
    experts = {"up_proj": (4, 2), "down_proj": (2, 4)}
    targets = [
        Target("model.embed_tokens", None, "embed", TargetKind.EMBEDDING, 8, 4),
        *(
            Target(f"{layer}.{name}", 0, "qk", TargetKind.LINEAR, *shape)
            for name, shape in shapes.items()
        ),
        *(
            Target(
                f"{layer}.mlp.experts.{name}", 0, name, TargetKind.EXPERTS, *shape, experts=EXPERTS
            )
            for name, shape in experts.items()
        ),
        Target("lm_head", None, "head", TargetKind.LINEAR, 4, 8),
    ]
    vectors = [
        Target(f"{layer}.input_layernorm", 0, "norm", TargetKind.VECTOR, 0, 4),
        Target(f"{layer}.self_attn.q_proj.bias", 0, "qk", TargetKind.VECTOR, 0, 8),
    ]
    return served.ModelLayout(
        "org/base", "0" * 64, torch.float32, (1, 2), tuple(targets), vectors=tuple(vectors)
    )


SERVED = _served_layout()


class _Stream:
    """A pull that receives the given messages."""

    source, mapped = "fuzz", None

    def __init__(self, messages: Iterable[bytes]) -> None:
        self._messages = messages
        self.taken: list[PullMessage] = []

    def pull(self, *_asked: object) -> _Stream:
        return self

    def __iter__(self) -> Generator[PullMessage]:
        for data in self._messages:
            message = to_pull_message(data)
            self.taken.append(message)
            yield message

    def cancel(self) -> None:
        pass


def fuzz_pull(data: bytes) -> None:
    """Pulls an image message by message: it is refused, or its bytes have the hashes that came with
    them."""
    pull(data.split(SEPARATOR))


def pull(sent: Iterable[bytes]) -> tuple[ImageHeader, bytes] | None:
    """Pulls an image from messages and returns its header and bytes, or None if it is refused."""
    stream = _Stream(sent)
    memory = bytearray(MAX_IMAGE_BYTES)
    events: list[PullEvent] = []

    def grant(event: PullEvent) -> None:
        events.append(event)
        assert isinstance(event, PullOpened)
        size = event.header.total_bytes
        if size > MAX_IMAGE_BYTES:  # more than the memory
            job.cancel()
        else:
            extents = [Extent(0, 0, size)] if size else []
            job.grant(ImageSink(memoryview(memory), extents))

    check_contents = partial(SERVED.check_contents, max_added_tokens=MAX_ADDED_TOKENS)
    puller = Puller(stream, 0, grant, SERVED.read_header, check_contents)
    job = PullJob(DIGEST, LAYOUT_ID)
    is_whole = False
    try:
        with refused(CorruptImage, StoreUnavailable, AdapterUnusable):
            puller.pull_once(job)
            _check_pulled(stream.taken, bytes(memory))
            is_whole = True
    except Cancelled:
        pass
    finally:
        puller.close()
    header = job.progress.header
    if header is not None:
        _check_header(header)
        assert len(job.progress.part_hashes) <= len(header.segments)
    if header is None or not is_whole:
        return None
    return header, bytes(memory[: header.total_bytes])


def _check_header(header: ImageHeader) -> None:
    for segment in header.segments:
        assert segment.offset % 256 == 0
        assert segment.offset + segment.length_bytes <= header.total_bytes
        assert SERVED.all_targets[segment.target]
    assert SERVED.refusal(header) is None


def _check_pulled(messages: list[PullMessage], memory: bytes) -> None:
    header = messages[0]
    assert isinstance(header, ImageHeader)
    image = b"".join(bytes(each.data) for each in messages if isinstance(each, ImageChunk))
    assert len(image) == header.total_bytes
    assert memory[: len(image)] == image
    start = 0
    for end in (each for each in messages if isinstance(each, LayerEnd)):
        assert hashlib.sha256(image[start : end.end_offset]).digest() == end.sha256
        start = end.end_offset
    assert start == len(image)


# --- adapters and their targets in a layout -----------------------------------------------------

HIDDEN, INNER, VOCAB = 8, 4, 300
_LAYER = "model.layers.0"


def _layout() -> Layout:
    """Returns a layout with every kind of target, and with modules that compute several targets."""
    attention = {"q": 8, "k": 4, "v": 4}
    targets = [Target("model.embed_tokens", None, "embed", TargetKind.EMBEDDING, VOCAB, HIDDEN)]
    start = 0
    for name, size in attention.items():
        other = OtherName(f"{_LAYER}.self_attn.qkv_proj", outputs=(start, start + size))
        path = f"{_LAYER}.self_attn.{name}_proj"
        shape = (TargetKind.LINEAR, HIDDEN, size)
        targets.append(Target(path, 0, "qkv", *shape, other_names=(other,)))
        start += size
    targets.append(Target(f"{_LAYER}.input_layernorm", 0, "norm", TargetKind.VECTOR, 0, HIDDEN))
    sizes = {"gate": (HIDDEN, INNER), "up": (HIDDEN, INNER), "down": (INNER, HIDDEN)}
    for part, (name, size_in_out) in enumerate(sizes.items()):
        fused = OtherName(f"{_LAYER}.mlp.experts.gate_up_proj", block_sizes=(1, 1), block_part=part)
        targets.append(
            Target(
                f"{_LAYER}.mlp.experts.{name}_proj",
                0,
                "down" if name == "down" else "gate_up",
                TargetKind.EXPERTS,
                *size_in_out,
                EXPERTS,
                other_names=() if name == "down" else (fused,),
            )
        )
    targets.append(Target("score", None, "score", TargetKind.LINEAR, HIDDEN, 0))
    targets.append(Target("lm_head", None, "head", TargetKind.LINEAR, HIDDEN, VOCAB))
    made = Layout("org/base", "0" * 64, DataType.BFLOAT16, 2, tuple(targets))
    validate(made)
    return made


LAYOUT = _layout()
OLD_LAYOUT = Layout("org/base", "0" * 64, DataType.FLOAT32, 1, tuple(
    Target(each.name, each.layer, each.group, each.kind, each.in_features, each.out_features)
    for each in LAYOUT.targets
    if each.kind in (TargetKind.LINEAR, TargetKind.EMBEDDING) and each.out_features
))  # fmt: skip


def fuzz_contents(data: bytes) -> None:
    """Reads an adapter from its config and header, without a byte of its tensors, and plans its
    images. The adapter is MLX-LM's if the config is."""
    config_text, _, header = data.partition(SEPARATOR)
    with refused(InvalidAdapter):
        checkpoint = read_checkpoint(config_text, header)
        assert checkpoint.rank <= LIMITS.max_rank
        for layout in (LAYOUT, OLD_LAYOUT):
            _plan(checkpoint, layout)


def read_checkpoint(
    config_text: bytes, header: bytes, limits: CheckpointLimits = LIMITS
) -> Checkpoint:
    """Returns an adapter with this config and header of tensors. Raises InvalidAdapter."""
    form = Format.MLX if b"lora_parameters" in config_text else Format.PEFT
    reader = READERS[form]
    config = reader.parse_config(parse_object(config_text, CONFIG_FILE), limits)
    file = len(header).to_bytes(LENGTH_BYTES, "little") + header
    size = len(file) + _end_of(header)
    if size > limits.max_source_bytes:
        raise InvalidAdapter("too large", subject=WEIGHTS_FILE)

    def read_at(offset: int, length: int) -> bytes:
        assert offset + length <= len(file), "the reader reads tensors"
        return file[offset : offset + length]

    records = read_header(
        read_at,
        size,
        WEIGHTS_FILE,
        max_header_bytes=limits.max_header_bytes,
        max_tensors=limits.max_tensors,
    )
    contents = reader.read_contents(records, config)
    checkpoint = Checkpoint(
        Path(),
        config,
        contents.targets,
        "",
        size,
        True,
        experts=contents.experts,
        replacements=contents.replacements,
    )
    hashes = {record.key: bytes(32) for record in records}
    assert len(checkpoint.records) == len(records), "a tensor is ignored without a message"
    assert checkpoint.compute_digest(hashes) == checkpoint.compute_digest(hashes)
    return checkpoint


def _end_of(header: bytes) -> int:
    """Returns the end of the last tensor, so that files of any size can be valid."""
    try:
        ends = [each["data_offsets"][1] for each in json.loads(header).values()]
        return max(0, *ends) if all(type(end) is int for end in ends) else 0
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return 0


def _plan(checkpoint: Checkpoint, layout: Layout) -> None:
    with refused(IncompatibleAdapter):
        check_plan(plan_image(checkpoint, layout), layout)


def check_plan(plan: ImagePlan, layout: Layout) -> None:
    """Checks that segments follow each other in the order of the targets, or share the place of an
    equal segment, and that the parts cover the whole image."""
    end = 0
    seen: dict[int, tuple[int, SegmentKind]] = {}
    columns = [segment.target for segment in plan.segments]
    assert columns == sorted(columns)
    for segment in plan.segments:
        assert segment.offset % 256 == 0
        assert layout.targets[segment.target]
        assert 0 <= segment.rank <= LIMITS.max_rank
        of = segment.length_bytes, segment.kind
        if segment.offset == end and segment.length_bytes:
            seen[segment.offset] = of
            end = -(-(end + segment.length_bytes) // 256) * 256
        else:
            assert seen[segment.offset] == of
    assert end == plan.total_bytes
    position = 0
    for start, stop in plan.parts:
        assert position == start < stop
        position = stop
    assert position == plan.total_bytes


# --- layouts ------------------------------------------------------------------------------------


def _fixed_adapters() -> list[Checkpoint]:
    """Returns adapters of targets that a layout may have: linear, fused, embedding, and experts
    in stacks and one by one."""
    shapes = {
        f"{_LAYER}.self_attn.q_proj": ([2, 8], [8, 2]),
        f"{_LAYER}.self_attn.qkv_proj": ([2, 8], [16, 2]),
        f"{_LAYER}.mlp.experts.down_proj": ([4, 2, 4], [4, 8, 2]),
        f"{_LAYER}.mlp.experts.1.up_proj": ([2, 8], [4, 2]),
    }
    config = json.dumps({"peft_type": "LORA", "r": 2, "target_modules": r".*_proj"}).encode()
    patient = replace(LIMITS, max_match_seconds=60.0)  # enough on a loaded machine
    headers = (
        header_of({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b})
        for name, (a, b) in shapes.items()
    )
    return [read_checkpoint(config, header, patient) for header in headers]


def header_of(shapes: dict[str, list[int]]) -> bytes:
    """Returns the .safetensors header of tensors with these shapes."""
    fields, position = {}, 0
    for name, shape in shapes.items():
        size = 4
        for each in shape:
            size *= each
        fields[name] = {
            "dtype": "F32", "shape": shape, "data_offsets": [position, position + size],
        }  # fmt: skip
        position += size
    return json.dumps(fields).encode()


ADAPTERS = _fixed_adapters()


def fuzz_layout(data: bytes) -> None:
    """Reads a server's layout: it is refused with the field's name, or has one form and one id, and
    adapters fit it or are refused with a name."""
    with refused(InvalidArgument):
        request = REQUESTS["RegisterLayout"].parse(data)
        layout = store_convert.from_layout(request.layout)
        formats = sorted({*IMAGE_FORMATS} & {*request.layout.image_formats})
        layout = replace(layout, image_format=formats[-1] if formats else 1)
        validate(layout)
        text = to_text(layout)
        again = from_text(text)
        assert again.targets == layout.targets
        assert layout_id(again) == layout_id(layout)
        for checkpoint in ADAPTERS:
            _plan(checkpoint, layout)
