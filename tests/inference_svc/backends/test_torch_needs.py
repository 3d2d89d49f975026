"""The memory that steps in torch are said to take is at least what their operations allocate."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch

from inference_svc.adapters.targets import applied_targets, build_layout
from inference_svc.backends.arena import table_bytes
from inference_svc.backends.torch import TorchBackend, TorchFactory
from inference_svc.backends.torch_needs import (
    OWN_BYTES,
    masks_bytes,
    picture_needs,
    plan_bytes,
    step_bytes,
    tile_bytes,
)
from inference_svc.core import (
    BASE_SLOT,
    Batch,
    BatchRow,
    EngineConfig,
    Request,
    SamplingParams,
    Sequence,
)
from inference_svc.model.architectures import load_description
from inference_svc.model.operations import Attend
from inference_svc.model.recurrent_states import RecurrentStates
from inference_svc.model.tower import TorchTile
from inference_svc.model.transformer import COMPUTE
from inference_svc.pictures.sizes import Size
from kernels.recurrence.reference import CHUNK
from tests.support.gpu.features import FEATURES, SHAPE
from tests.support.gpu.live_bytes import live_bytes
from tests.support.gpu.models import (
    MAX_ADDED,
    MAX_PAGES,
    MAX_RANK,
    MAX_ROWS,
    NUM_SLOTS,
    PAGE_SIZE,
    SUM,
    Model,
    make_decoder,
    steps,
)
from tests.support.models.encoders import FAMILIES as ENCODERS
from tests.support.models.encoders import MAX_TOKENS, save_encoder
from tests.support.pictures.models import READERS, make_reader
from tests.support.pictures.towers import compute, tower_of

pytestmark = pytest.mark.matrix

long = pytest.mark.long
NUM_DECODES = 20
MOST_TIMES_MORE = 3
_DELTA = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
HYBRIDS = {
    "many tokens": _DELTA | {"linear_key_head_dim": 8, "linear_value_head_dim": 12},
    "large states": _DELTA | {"linear_key_head_dim": 64, "linear_value_head_dim": 96},
    "short convolutions": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
}
"""Models with recurrent layers, which take most of a step."""


@pytest.mark.parametrize("hybrid", HYBRIDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recurrent_layers_take_no_more(tmp_path: Path, hybrid: str, dtype: torch.dtype) -> None:
    """Prompts in several chunks, and many rows of a token."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | HYBRIDS[hybrid]))
    decoder = load_description(tmp_path)
    model = Model.make(decoder, dtype, torch.device("cpu"))
    states = RecurrentStates.allocate(decoder, 2 * NUM_DECODES)
    targets = applied_targets(model.arena.layout, (), 0)
    backend = TorchBackend(
        model.transformer, model.caches(), model.arena, targets, NUM_DECODES, states=states
    )
    for lengths in ((3 * CHUNK + 7,), (CHUNK, 5, 1, 1), (1,) * NUM_DECODES):
        config = EngineConfig(
            tmp_path,
            "model",
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=max(lengths),
            page_size=PAGE_SIZE,
            max_sequences=len(lengths),
            max_batch_tokens=sum(lengths),
            max_loras=NUM_SLOTS,
            max_lora_rank=MAX_RANK,
            max_added_tokens=0,
        )
        inputs = backend.prepare(batch_of(lengths))
        with live_bytes() as live:
            backend.forward(inputs)
        said = step_bytes(config, decoder) - table_bytes(config, decoder, len(lengths))
        assert live.peak <= said
        assert live.peak > said / MOST_TIMES_MORE, "the bound says little"


def batch_of(lengths: tuple[int, ...]) -> Batch:
    """The first steps of prompts, whose pages are in order."""
    rows, page = [], 0
    for index, length in enumerate(lengths):
        sequence = Sequence(Request(f"{index}", (5,) * length, SamplingParams()))
        count = -(-length // PAGE_SIZE)
        sequence.page_ids = [*range(page, page + count)]
        sequence.state_written = index + 1
        page += count
        rows.append(BatchRow(sequence, 0, length, samples=True))
    return Batch(tuple(rows))


def test_an_operation_that_says_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory would be missing in the arithmetic, and the server would run out of it later."""
    decoder = make_decoder("llama", tmp_path)
    monkeypatch.delitem(OWN_BYTES, Attend)
    with pytest.raises(NotImplementedError, match="OWN_BYTES lacks Attend"):
        step_bytes(EngineConfig(tmp_path, "model"), decoder)


def test_every_operation_says_its_memory() -> None:
    assert OWN_BYTES.keys() == COMPUTE.keys()


SLOTS = {"each": [1, 2, 0, SUM, SUM], "base": [-1] * 5, "one": [0] * 5}
"""Of the rows. The base alone, and one adapter, take no more than all adapters and sums."""


@pytest.mark.parametrize(
    ("has_kinds", "dtype", "slots"),
    [
        pytest.param(
            *cell,
            marks=() if cell in {(False, "float32", "each"), (True, "bfloat16", "each")} else long,
        )
        for cell in product((False, True), ("float32", "bfloat16"), SLOTS)
    ],
)
@pytest.mark.parametrize("feature", FEATURES)
def test_steps_take_no_more(
    tmp_path: Path, feature: str, has_kinds: bool, dtype: str, slots: str
) -> None:
    """Prompts and decodes, with adapters of A and B, or of all kinds."""
    decoder = make_decoder(feature, tmp_path)
    num_added = MAX_ADDED if has_kinds else 0
    model = Model.make(decoder, getattr(torch, dtype), torch.device("cpu"))
    if has_kinds:
        model = model.with_kinds(num_added)
    backend = model.plain(num_added)
    for batch in steps(SLOTS[slots]):
        config = EngineConfig(
            tmp_path,
            "model",
            dtype=dtype,
            max_model_len=MAX_PAGES * PAGE_SIZE,
            page_size=PAGE_SIZE,
            max_sequences=MAX_ROWS,
            max_batch_tokens=sum(row.num_tokens for row in batch.rows),
            max_loras=NUM_SLOTS,
            max_lora_rank=MAX_RANK,
            max_added_tokens=num_added,
        )
        inputs = backend.prepare(batch)
        with live_bytes() as live:
            backend.forward(inputs)
        assert live.peak <= step_bytes(config, decoder)


LENGTHS = {
    "one": (MAX_TOKENS,),
    "short": (3,) * 40,
    "each once": tuple(range(60, MAX_TOKENS + 1, 2)),
}
"""Lengths of an encoder's rows: a step keeps a mask for each length and window."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ENCODERS)
def test_steps_of_encoders_take_no_more(tmp_path: Path, family: str, dtype: str) -> None:
    save_encoder(family, tmp_path, "Model")
    decoder = load_description(tmp_path)
    for lengths in LENGTHS.values():
        config = EngineConfig(
            tmp_path,
            "model",
            dtype=dtype,
            max_model_len=max(lengths),
            max_sequences=len(lengths),
            max_batch_tokens=sum(lengths),
            arena_bytes=1 << 20,
        )
        layout = build_layout(decoder, "", getattr(torch, dtype))
        backend = TorchFactory().build(config, decoder, layout)
        inputs = backend.prepare(batch_of(lengths))
        with live_bytes() as live:
            backend.forward(inputs)
        assert live.peak <= step_bytes(config, decoder)


@pytest.mark.parametrize("family", ["modernbert", "modernbert-plain"])
def test_a_step_keeps_a_mask_for_each_length(tmp_path: Path, family: str) -> None:
    """Not one alone, as large as the longest row's."""
    save_encoder(family, tmp_path, "Model")
    decoder, lengths = load_description(tmp_path), LENGTHS["each once"]
    config = EngineConfig(
        tmp_path,
        "model",
        max_model_len=max(lengths),
        max_sequences=len(lengths),
        max_batch_tokens=sum(lengths),
        arena_bytes=1 << 20,
    )
    backend = TorchFactory().build(config, decoder, build_layout(decoder, "", torch.float32))
    inputs = backend.prepare(batch_of(lengths))
    backend.forward(inputs)
    derived = inputs.step.attention.derived.values()
    kept_bytes = sum(each.nbytes for each in derived if isinstance(each, torch.Tensor))
    assert kept_bytes == sum(length**2 for length in lengths) > max(lengths) ** 2
    assert kept_bytes <= masks_bytes(config, decoder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", READERS)
def test_what_a_tower_takes(name: str, dtype: str, tmp_path: Path) -> None:
    """Of the largest tile, and another one's plan. Attention shows its inputs and outputs alone, as
    on a device."""
    make_reader(name, tmp_path)
    config = EngineConfig(
        tmp_path,
        "model",
        dtype=dtype,
        max_model_len=256,
        max_sequences=1,
        max_batch_tokens=64,
        max_lora_rank=8,
        prompt_image_bytes=0,
    )
    decoder = load_description(tmp_path, with_pictures=True)
    pictures = decoder.pictures
    assert pictures is not None
    form = pictures.tiles
    count = pictures.max_inner_tokens(config.max_model_len)
    side = 2 * form.cell_size
    num_columns = count // (2 * form.merge) // form.merge
    tiles = [Size(side, side), Size(side, num_columns * form.cell_size)]
    if form.tile_size:
        tiles = [form.whole]
    tile = tiles[-1]
    tower = tower_of(tmp_path, "torch", getattr(torch, dtype))
    encodings = [(each, tower.begin(each, 1)) for each in tiles]
    with live_bytes() as live:
        for each, encoding in encodings:
            compute(tower, encoding, bytes(3 * each.height * each.width), 1 << 20)
    for on_device in (True, False):
        said = picture_needs(config, decoder, on_device=on_device).workspace_bytes
        assert live.peak <= said < MOST_TIMES_MORE * live.peak
    encoding = tower.begin(tile, 1)
    tower.go_on(encoding, bytes(3 * tile.height * tile.width), 1, BASE_SLOT)
    state = encoding.state
    assert isinstance(state, TorchTile)
    waves = [wave for both in state.angles.values() for wave in both]
    num_bytes = sum(each.nbytes for each in (state.hidden, *state.qkv, *waves))
    assert num_bytes == tile_bytes(pictures.tower, getattr(torch, dtype), state.plan.num_tokens)
    plan = state.plan
    rows = (plan.patches, plan.positions, plan.cells, *(plan.blend or ()))
    assert sum(each.nbytes for each in rows) <= plan_bytes(pictures, plan.num_tokens)
