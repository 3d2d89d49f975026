"""Odd shapes in every kind of tensor of every reader: refused by the tensor's name, or compiled, or
a verdict, and never an error that nobody expects."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.checkpoint.reading.files import open_file
from adapter_store.checkpoint.reading.safetensors import encode_header, read_header
from adapter_store.errors import IncompatibleAdapter, InvalidAdapter
from adapter_store.images.compile import compile_image
from contract.adapter_files import MLX_WEIGHTS_FILE
from contract.images.dtypes import DataType
from contract.images.layout_rules import validate
from contract.images.layouts import Layout
from contract.images.targets import Target, TargetKind
from tests.support.examples import examples
from tests.support.store.checkpoints import CONFIG, WEIGHTS
from tests.support.store.trained_experts import FOLDERS
from tests.support.store.trained_experts import layout as experts_layout

pytestmark = pytest.mark.matrix

HIDDEN, VOCAB, RANK = 16, 64, 2
EMBEDDING, HEAD, NORM = "model.embed_tokens", "lm_head", "model.norm"
Q = "model.layers.0.self_attn.q_proj"
PREFIX = "base_model.model."
PAIR = {f"{Q}.lora_A.weight": (RANK, HIDDEN), f"{Q}.lora_B.weight": (HIDDEN, RANK)}
EMBEDDED = {
    f"{EMBEDDING}.lora_embedding_A": (RANK, VOCAB),
    f"{EMBEDDING}.lora_embedding_B": (HIDDEN, RANK),
}
Shapes = Mapping[str, tuple[int, ...]]


class Adapter(NamedTuple):
    config: Mapping[str, Any]
    shapes: Shapes
    weights_file: str = WEIGHTS


def peft(shapes: Shapes, **config: Any) -> Adapter:
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4, "target_modules": ["q_proj"]}
    return Adapter(fields | config, {f"{PREFIX}{name}": each for name, each in shapes.items()})


def of_trainer(trainer: str, weights_file: str = WEIGHTS) -> Adapter:
    folder = FOLDERS / trainer
    with open_file(folder, weights_file) as file:
        records = read_header(
            *(file.read_at, file.size_bytes, weights_file),
            max_header_bytes=1 << 20,
            max_tensors=1000,
        )
    shapes = {record.key: record.shape for record in records}
    return Adapter(json.loads((folder / CONFIG).read_text()), shapes, weights_file)


WHOLE = {f"{EMBEDDING}.weight": (VOCAB, HIDDEN), f"{HEAD}.weight": (VOCAB, HIDDEN)}
ADAPTERS = {
    "A and B": peft(PAIR),
    "a bias of B": peft({**PAIR, f"{Q}.lora_B.bias": (HIDDEN,)}, lora_bias=True),
    "a magnitude": peft({**PAIR, f"{Q}.lora_magnitude_vector": (HIDDEN,)}, use_dora=True),
    "an embedding": peft(EMBEDDED, target_modules=["embed_tokens"]),
    "a magnitude of an embedding": peft(
        {**EMBEDDED, f"{EMBEDDING}.lora_magnitude_vector": (HIDDEN,)},
        target_modules=["embed_tokens"],
        use_dora=True,
    ),
    "saved modules": peft(
        {**PAIR, **WHOLE, f"{NORM}.weight": (HIDDEN,), "score.weight": (3, HIDDEN)},
        modules_to_save=["embed_tokens", "lm_head", "norm", "score"],
    ),
    "biases of the base": peft({**PAIR, f"{Q}.bias": (HIDDEN,)}, bias="all"),
    "copies of the base": peft(
        {**EMBEDDED, f"{EMBEDDING}.base_layer.weight": (VOCAB, HIDDEN)},
        target_modules=["embed_tokens"],
    ),
    "trained tokens": peft(
        {**PAIR, f"{EMBEDDING}.token_adapter.trainable_tokens_delta": (2, HIDDEN)},
        trainable_token_indices=[1, VOCAB + 1],
    ),
    "experts one by one": of_trainer("experts_apart"),
    "experts as parameters": of_trainer("experts_parameters"),
    "experts in stacks": of_trainer("experts_tinker"),
    "MLX-LM": of_trainer("mlx", MLX_WEIGHTS_FILE),
    "MLX-LM's experts": of_trainer("experts_mlx", MLX_WEIGHTS_FILE),
}
SIZES = sorted(
    {0, 1, 2, 3, 5, 128, *(n for a in ADAPTERS.values() for s in a.shapes.values() for n in s)}
)


def everything() -> Layout:
    """Returns a layout with a target for all that the adapters change."""
    hashes: dict[str, Any] = {"base_hashes": (bytes(32),), "base_dtype": DataType.FLOAT32}
    targets = [
        Target(EMBEDDING, None, "embed", TargetKind.EMBEDDING, VOCAB, HIDDEN, **hashes),
        Target(Q, 0, "qkv", TargetKind.LINEAR, HIDDEN, HIDDEN),
        Target(Q.replace("q_proj", "v_proj"), 0, "qkv", TargetKind.LINEAR, HIDDEN, HIDDEN // 2),
        Target(f"{Q}.bias", 0, "bias", TargetKind.VECTOR, 0, HIDDEN),
        *experts_layout().targets,
        *(
            Target(f"model.layers.1.self_attn.{name}", 1, "qkv1", TargetKind.LINEAR, HIDDEN, size)
            for name, size in (("q_proj", HIDDEN), ("v_proj", HIDDEN // 2))
        ),
        Target(NORM, None, "norm", TargetKind.VECTOR, 0, HIDDEN),
        Target(HEAD, None, "head", TargetKind.LINEAR, HIDDEN, VOCAB, **hashes),
        Target("score", None, "score", TargetKind.LINEAR, HIDDEN, 0),
    ]
    made = Layout("org/tiny", "0" * 64, DataType.FLOAT32, 2, tuple(targets))
    validate(made)
    return made


LAYOUT = everything()


def save(folder: Path, adapter: Adapter, changed: Shapes) -> None:
    shapes = {**adapter.shapes, **changed}
    header = encode_header((name, DataType.FLOAT32, shape) for name, shape in shapes.items())
    (folder / CONFIG).write_text(json.dumps(dict(adapter.config)))
    with open(folder / adapter.weights_file, "wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(4 * math.prod(shape) for shape in shapes.values()))


def outcome(folder: Path, adapter: Adapter, changed: Shapes) -> str:
    """What becomes of the adapter with these shapes in place of its own."""
    save(folder, adapter, changed)
    try:
        compile_image(open_checkpoint(folder), LAYOUT)
    except (InvalidAdapter, IncompatibleAdapter) as error:
        return f"{error.reason} {error.subject}"
    return "compiled"


@pytest.mark.parametrize("kind", ADAPTERS)
def test_as_they_are_saved_they_are_compiled(tmp_path, kind):
    assert outcome(tmp_path, ADAPTERS[kind], {}) == "compiled"


TENSORS = [(kind, name) for kind, adapter in ADAPTERS.items() for name in adapter.shapes]


@pytest.mark.parametrize(("kind", "name"), TENSORS)
def test_a_number_is_no_tensor(tmp_path, kind, name):
    save(tmp_path, ADAPTERS[kind], {name: ()})
    with pytest.raises(InvalidAdapter) as caught:
        open_checkpoint(tmp_path)
    assert (caught.value.subject, caught.value.reason) == (name, "SHAPE_INVALID")


@pytest.mark.parametrize("kind", ADAPTERS)
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_their_shapes(tmp_path, kind, data):
    adapter = ADAPTERS[kind]
    names = data.draw(st.lists(st.sampled_from(sorted(adapter.shapes)), min_size=1, unique=True))
    shape = st.lists(st.sampled_from(SIZES), max_size=4).map(tuple)
    found = outcome(tmp_path, adapter, {name: data.draw(shape) for name in names[:3]})
    assert found == "compiled" or found.split()[1:], "it names no culprit"
