"""Native towers: their memory, and tiles that are computed in turns."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_svc.backends.native.needs import tower_needs
from inference_svc.backends.native.towers.tiles import NativeTile, tile_bytes
from inference_svc.backends.native.towers.tower import NativeTower
from inference_svc.core import BASE_SLOT, EngineConfig
from inference_svc.model.architectures import load_description
from inference_svc.model.description import decoder
from inference_svc.pictures.sizes import Size
from kernels.attention import both_ways
from kernels.lora.table import MAX_PARTS
from tests.support.pictures.models import PATCH, READERS, TILE, make_reader
from tests.support.pictures.towers import BACKENDS, compute, tower_of


def bytes_of(tile: NativeTile) -> int:
    waves = [each for both in tile.angles.values() for each in both]
    packed = [each for cells in tile.packed for each in (cells.keys, cells.values)]
    rows = (tile.hidden, tile.qkv, *waves)
    return sum(each.untyped_storage().nbytes() for each in (*rows, *packed))


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", READERS)
def test_memory_is_counted_before_it_is_taken(name: str, dtype: str, tmp_path: Path) -> None:
    make_reader(name, tmp_path)
    config = EngineConfig(
        tmp_path,
        "model",
        dtype=dtype,
        max_model_len=64,
        max_sequences=1,
        max_batch_tokens=64,
        max_lora_rank=8,
        arena_bytes=1 << 20,
        num_threads=torch.get_num_threads(),
    )
    model = load_description(tmp_path, with_pictures=True)
    pictures = model.pictures
    assert pictures is not None
    longest = pictures.max_inner_tokens(config.max_model_len)
    tower = tower_of(tmp_path, "native", getattr(torch, dtype), longest)
    assert isinstance(tower, NativeTower)
    counted = tower_needs(config, model).workspace_bytes
    held = tower.workspace_bytes + tile_bytes(pictures.tower, getattr(torch, dtype), longest)
    assert held <= counted <= held + MAX_PARTS * (1 << 20)


@pytest.mark.parametrize("name", ["SmolVLM", "Qwen2_5_VL", "Qwen3VL", "Gemma4Small"])
def test_a_tile_has_the_memory_that_was_counted(name: str, tmp_path: Path) -> None:
    make_reader(name, tmp_path)
    tower = tower_of(tmp_path, "native")
    encoding = tower.begin(Size(TILE, TILE), 1)
    tower.go_on(encoding, bytes(3 * TILE * TILE), 1, BASE_SLOT)
    pictures = load_description(tmp_path, with_pictures=True).pictures
    assert pictures is not None
    assert isinstance(encoding.state, NativeTile)
    counted = tile_bytes(pictures.tower, torch.float32, encoding.state.plan.num_tokens)
    assert bytes_of(encoding.state) == counted


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["SmolVLM", "Qwen2VL"])
def test_a_tower_has_the_state_of_one_tile(name: str, backend: str, tmp_path: Path) -> None:
    """The work of a picture may have failed, which is then computed with its row, while another one
    is begun: this one's tile begins again."""
    make_reader(name, tmp_path)
    tower, tile = tower_of(tmp_path, backend), Size(4 * PATCH, 4 * PATCH)
    tile = tile if name == "Qwen2VL" else Size(TILE, TILE)
    torch.manual_seed(0)
    pixels = [torch.randint(0, 256, (2, *tile, 3), dtype=torch.uint8).numpy() for _ in range(2)]
    alone = [tower.begin(tile, 2) for _ in range(2)]
    for encoding, own in zip(alone, pixels, strict=True):
        compute(tower, encoding, own.tobytes(), 1)
    first, other = (tower.begin(tile, 2) for _ in range(2))
    while not first.index or first.num_units < 2:  # in the second tile
        tower.go_on(first, pixels[0].tobytes(), 1, BASE_SLOT)
    while not other.is_done:
        tower.go_on(other, pixels[1].tobytes(), 1, BASE_SLOT)
        assert sum(each.state is not None for each in (first, other)) <= 1
    assert (first.index, first.num_units) == (1, 0)
    compute(tower, first, pixels[0].tobytes(), 1)
    for encoding, wanted in zip((first, other), alone, strict=True):
        assert torch.equal(encoding.rows, wanted.rows)


@pytest.mark.parametrize(
    ("name", "most_pairs", "slot"),
    [
        *product(["Qwen2VL", "Qwen2_5_VL", "Mistral3"], [1, 4_000, 8_000], [BASE_SLOT]),
        ("Qwen2_5_VL", 4_000, 0),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_that_is_divided_has_the_same_bits(
    name: str,
    most_pairs: int,
    backend: str,
    slot: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many shares of a strip's attention are computed at once, without an adapter and with
    one. Torch may round anew."""
    tolerance = 0.0 if backend == "native" else 1e-5
    dtype = torch.bfloat16 if backend == "native" else torch.float32
    make_reader(name, tmp_path)
    tile = Size(20 * PATCH, 14 * PATCH)
    pixels = torch.randint(0, 256, (2, *tile, 3), dtype=torch.uint8).numpy()
    tower = tower_of(tmp_path, backend, dtype, has_adapter=True)
    whole = [tower.begin(tile, 1) for _ in range(2)]
    for encoding, own in zip(whole, pixels, strict=True):
        compute(tower, encoding, own.tobytes(), 1000, slot)
    monkeypatch.setattr(decoder, "SHARE_PAIRS", most_pairs)
    tower = tower_of(tmp_path, backend, dtype, has_adapter=True)
    units = tower.order
    assert len(units.shares(tile)) > 1
    for num_units in (1, 3, 50):
        for own, wanted in zip(pixels, whole, strict=True):
            encoding = tower.begin(tile, 1)
            num_turns = compute(tower, encoding, own.tobytes(), num_units, slot)
            assert num_turns == -(-units.count(tile) // num_units)
            torch.testing.assert_close(encoding.rows, wanted.rows, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["_attend", "_compute"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_picture_begins_again_where_a_share_or_products_fail(
    backend: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs of attention have taken the place of its queries."""
    make_reader("Qwen2VL", tmp_path)
    monkeypatch.setattr(decoder, "SHARE_PAIRS", 1)
    tower, tile = tower_of(tmp_path, backend), Size(8 * PATCH, 8 * PATCH)
    pixels = torch.randint(0, 256, (*tile, 3), dtype=torch.uint8).numpy().tobytes()
    whole, encoding = tower.begin(tile, 1), tower.begin(tile, 1)
    compute(tower, whole, pixels, 1)
    while tower.order.find(tile, encoding.num_units)[:3] != (1, 0, 1):
        tower.go_on(encoding, pixels, 1, BASE_SLOT)
    own = getattr(tower, name)

    def fails_late(*args: Any) -> None:
        own(*args)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(tower, name, fails_late)
        with pytest.raises(MemoryError):
            tower.go_on(encoding, pixels, 1000, BASE_SLOT)
    compute(tower, encoding, pixels, 1)
    assert torch.equal(encoding.rows, whole.rows)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shares_and_products_are_not_of_one_unit(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest unit would be as long as both."""
    make_reader("Qwen2VL", tmp_path)
    monkeypatch.setattr(decoder, "SHARE_PAIRS", 1)
    tower, tile = tower_of(tmp_path, backend), Size(20 * PATCH, 14 * PATCH)
    done = ""

    def noting(name: str) -> Any:
        own = getattr(tower, f"_{name}")

        def call(*args: Any) -> Any:
            nonlocal done
            done += name[0]
            return own(*args)

        return call

    for name in ("attend", "compute"):
        monkeypatch.setattr(tower, f"_{name}", noting(name))
    black, encoding, found = bytes(3 * tile.height * tile.width), tower.begin(tile, 1), []
    for _ in range(tower.order.count(tile)):
        done = ""
        tower.go_on(encoding, black, 1, BASE_SLOT)
        found.append(done)
    num_strips, num_shares = len(tower.order.tiles.strips(tile)), len(tower.order.shares(tile))
    of_layer = (["a"] * num_shares + ["c"]) * num_strips
    assert found == ["c"] * num_strips + of_layer * len(tower.order.sees_all)


def test_shares_that_a_step_pays_for_are_computed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_reader("Qwen2VL", tmp_path)
    monkeypatch.setattr(decoder, "SHARE_PAIRS", 1)
    tower, tile = tower_of(tmp_path, "torch"), Size(20 * PATCH, 14 * PATCH)
    attend, num_attends = both_ways.attend_all, 0

    def count(*args: Any) -> torch.Tensor:
        nonlocal num_attends
        num_attends += 1
        return attend(*args)

    monkeypatch.setattr(both_ways, "attend_all", count)
    black, found = bytes(3 * tile.height * tile.width), []
    num_shares = len(tower.order.shares(tile))
    for num_units in (1, num_shares - 1):
        num_attends = 0
        compute(tower, tower.begin(tile, 1), black, num_units)
        found.append(num_attends)
    assert 0 < found[1] < found[0]
