"""Embeddings of pictures equal those of transformers, for every class of towers."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from inference_svc.core import BASE_SLOT
from inference_svc.errors import UnsupportedModel
from inference_svc.model.architectures import load_description
from inference_svc.model.description import Pictures
from inference_svc.model.operations import Project
from inference_svc.model.tower import normalised
from inference_svc.model.transformer import COMPUTE
from inference_svc.pictures.sizes import MAX_SLICE, Size
from tests.support.models.parity import relative_rms
from tests.support.models.saved_weights import pack
from tests.support.pictures.models import (
    FREE,
    GEMMA4,
    PATCH,
    READERS,
    SQUARES,
    TILE,
    VISION,
    cell_patches,
    make_reader,
    save_config,
    save_processor,
)
from tests.support.pictures.towers import BACKENDS, compute, tower_of

SQUARE = Size(TILE, TILE)


def pictures_of(folder: Path) -> Pictures:
    found = load_description(folder, with_pictures=True).pictures
    assert found is not None
    return found


Saved = Callable[..., tuple[Any, Path]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """`saved(name, **changes)`: transformers' model, and its folder, for tests that change neither.
    Random numbers begin anew."""
    made: dict[str, tuple[Any, Path]] = {}

    def save(name: str, **changes: Any) -> tuple[Any, Path]:
        key = f"{name} {sorted(changes.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(name)
            made[key] = make_reader(name, folder, **changes), folder
        torch.manual_seed(0)
        return made[key]

    return save


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def expected_rows(model: torch.nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """[tokens, hidden_size]"""
    is_llava = "Llava" in type(model).__name__
    is_cut = not (is_llava or "Gemma3" in type(model).__name__)
    names = ("vision_feature_layer", "vision_feature_select_strategy")
    options = {name: getattr(model.config, name) for name in names} if is_llava else {}
    with torch.no_grad():
        found = model.get_image_features(pixel_values=pixels[None] if is_cut else pixels, **options)
    return torch.cat(list(found.pooler_output))


@pytest.mark.matrix
@pytest.mark.parametrize("name", SQUARES)
@pytest.mark.parametrize("num_units", [1, 3, 100])
def test_embeddings_equal_transformers(
    name: str, num_units: int, backend: str, saved: Saved
) -> None:
    """Computed at once, or a few layers of strips at a time."""
    model, folder = saved(name)
    tower, pictures = tower_of(folder, backend), pictures_of(folder)
    tiles = torch.randint(0, 256, (3, TILE, TILE, 3), dtype=torch.uint8)
    encoding = tower.begin(SQUARE, 3)
    num_turns = compute(tower, encoding, tiles.numpy().tobytes(), num_units)
    num_units_of_tile = len(pictures.tiles.strips(SQUARE)) * (pictures.tower.num_layers + 1)
    assert num_turns == -(-3 * num_units_of_tile // num_units)
    processor = pictures.processor
    expected = expected_rows(model, normalised(tiles, processor))
    assert encoding.rows.shape == expected.shape
    assert relative_rms(encoding.rows, expected) <= 1e-5


def test_a_cell_may_have_more_patches_than_a_part(backend: str, tmp_path: Path) -> None:
    """Gemma 3 may have one token for an image, whatever its number of patches."""
    side = 2 * 34
    vision = VISION | {"model_type": "siglip_vision_model", "image_size": side, "patch_size": 2}
    model = make_reader("Gemma3", tmp_path, vision_config=vision, mm_tokens_per_image=1)
    save_processor("Gemma3", tmp_path, size={"height": side, "width": side})
    tower, pictures = tower_of(tmp_path, backend), pictures_of(tmp_path)
    assert pictures.tiles.inner_tokens(pictures.tiles.whole) == 34**2 > MAX_SLICE
    tiles = torch.randint(0, 256, (1, side, side, 3), dtype=torch.uint8)
    encoding = tower.begin(Size(side, side), 1)
    compute(tower, encoding, tiles.numpy().tobytes(), 1)
    expected = expected_rows(model, normalised(tiles, pictures.processor))
    assert relative_rms(encoding.rows, expected) <= 1e-5


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_weights_in_few_bits_are_dequantised(form: str, backend: str, tmp_path: Path) -> None:
    """As bitsandbytes packs towers. Layers without scales are plain, whatever the config lists."""
    folder = tmp_path / "model"
    make_reader("Gemma3", folder)
    meant = pack(folder, form)
    shutil.copy(folder / "preprocessor_config.json", meant)
    packed = [name for name in load_file(folder / "model.safetensors") if "vision" in name]
    assert sum("q_proj.weight_scale" in name for name in packed) == 3
    rows = []
    for each in (folder, meant):
        tower = tower_of(each, backend)
        encoding = tower.begin(SQUARE, 1)
        torch.manual_seed(0)
        tiles = torch.randint(0, 256, (1, TILE, TILE, 3), dtype=torch.uint8)
        compute(tower, encoding, tiles.numpy().tobytes(), 1000)
        rows.append(encoding.rows)
    assert relative_rms(*rows) <= 1e-6


@pytest.mark.matrix
@pytest.mark.parametrize("name", FREE)
@pytest.mark.parametrize("size", [(2, 2), (8, 14), (14, 6), (36, 40)])
@pytest.mark.parametrize("num_units", [7, 1000])
def test_tiles_of_any_size_equal_transformers(
    name: str, size: tuple[int, int], num_units: int, backend: str, saved: Saved
) -> None:
    """Rows and columns of patches of one strip, of cut windows, and of several parts."""
    model, folder = saved(name)
    tower, pictures = tower_of(folder, backend), pictures_of(folder)
    tile = Size(*(PATCH * each for each in size))
    pixels = torch.randint(0, 256, (1, *tile, 3), dtype=torch.uint8)
    encoding = tower.begin(tile, 1)
    num_turns = compute(tower, encoding, pixels.numpy().tobytes(), num_units)
    num_strips = len(pictures.tiles.strips(tile))
    assert num_turns == -(-num_strips * (pictures.tower.num_layers + 1) // num_units)
    expected = free_rows(model, normalised(pixels, pictures.processor)[0])
    assert encoding.rows.shape == expected.shape
    assert relative_rms(encoding.rows, expected) <= 1e-5


def free_rows(model: Any, tile: torch.Tensor) -> torch.Tensor:
    """Returns transformers' embeddings of a tile [3, height, width] for Qwen's classes, with the
    ones of taps beside them: [tokens, hidden_size * (1 + taps)]."""
    both = cell_patches(tile)[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1)
    grid = torch.tensor([[1, *(side // PATCH for side in tile.shape[1:])]])
    with torch.no_grad():
        found = model.model.get_image_features(both, grid)
    of_taps = getattr(found, "deepstack_features", None) or ()
    return torch.cat([torch.cat(list(rows)) for rows in (found.pooler_output, *of_taps)], 1)


def test_taps_count_in_order_of_layers(backend: str, saved: Saved) -> None:
    """Wherever a config lists them; a tap's place in the list is its module's."""
    vision = READERS["Qwen3VL"][1]["vision_config"] | {"deepstack_visual_indexes": [2, 0]}
    model, folder = saved("Qwen3VL", vision_config=vision)
    tower = tower_of(folder, backend)
    tile = Size(4 * PATCH, 6 * PATCH)
    pixels = torch.randint(0, 256, (1, *tile, 3), dtype=torch.uint8)
    encoding = tower.begin(tile, 1)
    compute(tower, encoding, pixels.numpy().tobytes(), 100)
    pictures = pictures_of(folder)
    expected = free_rows(model, normalised(pixels, pictures.processor)[0])
    assert relative_rms(encoding.rows, expected) <= 1e-5


@pytest.mark.matrix
@pytest.mark.parametrize("size", [(2, 4), (8, 14), (14, 6), (36, 40)])
@pytest.mark.parametrize("layer", [-1, 2])
def test_pixtral_equals_transformers(
    layer: int, size: tuple[int, int], backend: str, saved: Saved
) -> None:
    """Of a grid of its own, of one part and of several, up to the last layer or before."""
    model, folder = saved("Mistral3", vision_feature_layer=layer)
    tower, pictures = tower_of(folder, backend), pictures_of(folder)
    tile = Size(*(PATCH * each for each in size))
    pixels = torch.randint(0, 256, (1, *tile, 3), dtype=torch.uint8)
    encoding = tower.begin(tile, 1)
    compute(tower, encoding, pixels.numpy().tobytes(), 20)
    with torch.no_grad():
        found = model.model.get_image_features(
            normalised(pixels, pictures.processor), [tile], vision_feature_layer=layer
        )
    expected = torch.cat(list(found.pooler_output))
    assert encoding.rows.shape == expected.shape
    assert relative_rms(encoding.rows, expected) <= 1e-5


@pytest.mark.matrix
@pytest.mark.parametrize("size", [(2, 4), (8, 14), (6, 46), (36, 40)])
@pytest.mark.parametrize("name", GEMMA4)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_gemma4_equals_transformers(
    name: str,
    size: tuple[int, int],
    dtype: torch.dtype,
    most: float,
    backend: str,
    saved: Saved,
) -> None:
    """Of one part and of several; clipped, or standardised."""
    model, folder = saved(name)
    tower = tower_of(folder, backend, dtype)
    pictures = load_description(folder, with_pictures=True).pictures
    tile = Size(*(PATCH * each for each in size))
    pixels = torch.randint(0, 256, (1, *tile, 3), dtype=torch.uint8)
    encoding = tower.begin(tile, 1)
    compute(tower, encoding, pixels.numpy().tobytes(), 1)
    cut = (pixels[0] / 255).unflatten(1, (-1, PATCH)).unflatten(0, (-1, PATCH))
    patches = cut.transpose(1, 2).flatten(0, 1).flatten(1)
    places = torch.cartesian_prod(torch.arange(size[0]), torch.arange(size[1])).flip(1)
    with torch.no_grad():
        found = model.model.get_image_features(patches[None], places[None])
    expected = torch.cat(list(found.pooler_output))
    assert encoding.rows.shape == expected.shape == (size[0] * size[1] // 4, 48)
    assert encoding.rows.dtype is dtype
    assert relative_rms(encoding.rows.float(), expected) <= most
    assert pictures.are_mutual == (name == "Gemma4")


@pytest.mark.parametrize(("num_per_side", "merge"), [(19, 1), (25, 5), (27, 3)])
def test_positions_and_borders_of_patches_are_those_of_transformers(
    num_per_side: int, merge: int, backend: str, tmp_path: Path
) -> None:
    """For some numbers of patches two have the same position; and the last pixels of a side may
    belong to no patch."""
    side = 2 * num_per_side + 1
    vision = VISION | {"image_size": side, "patch_size": 2}
    model = make_reader("Idefics3", tmp_path, vision_config=vision, scale_factor=merge)
    save_processor("Idefics3", tmp_path, max_image_size={"longest_edge": side})
    tower = tower_of(tmp_path, backend)
    tiles = torch.randint(0, 256, (1, side, side, 3), dtype=torch.uint8)
    encoding = tower.begin(Size(side, side), 1)
    compute(tower, encoding, tiles.numpy().tobytes(), 1000)
    processor = pictures_of(tmp_path).processor
    assert relative_rms(encoding.rows, expected_rows(model, normalised(tiles, processor))) <= 1e-5


def test_begun_and_finished_pictures_keep_no_pixels(backend: str, saved: Saved) -> None:
    """Their bytes are the ones of their embeddings, within which the engine keeps them."""
    _, folder = saved("SmolVLM")
    tower = tower_of(folder, backend)
    pixels = random.Random(0).randbytes(2 * TILE * TILE * 3)
    encoding = tower.begin(SQUARE, 2)
    while not encoding.is_done:
        tower.go_on(encoding, pixels, 4, BASE_SLOT)
        assert pixels[:PATCH] not in pickle.dumps(encoding)


@pytest.mark.parametrize("place", [5, 7, 10])
def test_a_picture_begins_again_behind_an_error(
    place: int, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit that fails in the middle has changed the stream that it began with."""
    _, folder = saved("Llava")
    tower, num_products = tower_of(folder, "torch"), 0
    pixels = random.Random(0).randbytes(TILE * TILE * 3)
    expected = tower.begin(SQUARE, 1)
    compute(tower, expected, pixels, 1)
    project = COMPUTE[Project]

    def fail_once(op: Any, step: Any) -> Any:
        nonlocal num_products
        num_products += 1
        if num_products == place:
            raise MemoryError
        return project(op, step)

    monkeypatch.setitem(COMPUTE, Project, fail_once)
    encoding = tower.begin(SQUARE, 1)
    with pytest.raises(MemoryError):
        compute(tower, encoding, pixels, 1)
    compute(tower, encoding, pixels, 1)
    assert torch.equal(encoding.rows, expected.rows)


@pytest.mark.parametrize("name", SQUARES)
def test_the_embeddings_are_in_the_models_dtype(name: str, backend: str, saved: Saved) -> None:
    model, folder = saved(name)
    tower = tower_of(folder, backend, torch.bfloat16)
    tiles = torch.randint(0, 256, (1, TILE, TILE, 3), dtype=torch.uint8)
    encoding = tower.begin(SQUARE, 1)
    compute(tower, encoding, tiles.numpy().tobytes(), 100)
    assert encoding.rows.dtype is torch.bfloat16
    processor = pictures_of(folder).processor
    expected = expected_rows(model, normalised(tiles, processor))
    assert relative_rms(encoding.rows.float(), expected) <= 3e-2


@pytest.mark.parametrize(
    ("part", "key", "value", "named"),
    [
        ("vision_config", "model_type", "dinov2", "vision_config.model_type"),
        ("vision_config", "num_channels", 4, "num_channels"),
        ("vision_config", "rope_theta_2d", 3, "rope_theta_2d"),
        ("vision_config", "patch_size", 0, "patch_size"),
        ("", "vision_feature_layer", [1, 2], "vision_feature_layer"),
        ("", "vision_feature_select_strategy", "none", "vision_feature_select_strategy"),
        ("", "projector_hidden_act", "tanh", "projector_hidden_act"),
    ],
)
def test_a_tower_that_is_not_computed_is_refused(
    part: str, key: str, value: object, named: str, tmp_path: Path
) -> None:
    _check_refused("Llava", part, key, value, named, tmp_path)


def test_layers_without_end_are_refused(tmp_path: Path) -> None:
    named = f"depth = {1 << 40}: must be 1 to 1024"
    _check_refused("Qwen3VL", "vision_config", "depth", 1 << 40, named, tmp_path)


ROTATED = ("Mistral3", "Qwen2_5_VL", "Qwen3VL")
"""Their towers rotate by rows and columns; the name of that depends on transformers' release."""


@pytest.mark.parametrize("model", ROTATED)
def test_a_rotation_has_two_names(model: str, tmp_path: Path) -> None:
    folder = save_config(model, tmp_path / "model")
    towers = []
    for kind in ("axial", "default"):
        _change_config(
            folder, "vision_config", "rope_parameters", {"rope_type": kind, "rope_theta": 99.0}
        )
        towers.append(load_description(folder, with_pictures=True).pictures.tower)
    assert towers[0] == towers[1]
    assert [rope.rope_theta for rope, _ in towers[0].ropes] == [99.0]


@pytest.mark.parametrize("model", ROTATED)
@pytest.mark.parametrize(
    "value", [{"rope_type": "yarn"}, {"type": "linear"}, {"rope_type": ["axial"]}, [1]]
)
def test_another_rotation_is_refused(model: str, value: object, tmp_path: Path) -> None:
    _check_refused(model, "vision_config", "rope_parameters", value, "rope_parameters", tmp_path)


@pytest.mark.parametrize("count", [15, 9, 0, None])
def test_tokens_of_an_image_that_are_no_square_of_patches_are_refused(
    count: object, tmp_path: Path
) -> None:
    _check_refused("Gemma3", "", "mm_tokens_per_image", count, "mm_tokens_per_image", tmp_path)


def _check_refused(
    model: str, part: str, key: str, value: object, named: str, tmp_path: Path
) -> None:
    """Asserts that a config with this value has text alone."""
    folder = save_config(model, tmp_path / "model")
    _change_config(folder, part, key, value)
    with pytest.raises(UnsupportedModel, match=named):
        load_description(folder, with_pictures=True)
    assert load_description(folder).pictures is None


def _change_config(folder: Path, part: str, key: str, value: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    (config[part] if part else config)[key] = value
    path.write_text(json.dumps(config))


def test_text_alone_needs_no_processor(tmp_path: Path) -> None:
    folder = save_config("Llava", tmp_path / "model")
    (folder / "preprocessor_config.json").unlink()
    assert load_description(folder).pictures is None
    with pytest.raises(UnsupportedModel, match=r"preprocessor_config\.json.*--max-prompt-images 0"):
        load_description(folder, with_pictures=True)
