"""How a checkpoint's processor makes tiles of a picture: facts of its own files."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inference_svc.errors import UnsupportedModel
from inference_svc.pictures.sizes import Size, TileForm

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
MAX_FILE_BYTES = 1 << 20
MAX_SIDE = 4096
"""The longest side of a picture that is cut into tiles; transformers has the same bound."""
MAX_LENGTH = 1 << 16
MAX_AREA = 32 << 20
"""The most pixels of a picture that stays one tile of any size."""
MAX_RATIO = 200
"""How many times as long as the other side a side of such a picture may be."""
CHANNELS = 3
RESCALE = 1 / 255
FILTERS = range(6)
"""Pillow's filters for changing sizes, by number."""
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""The most tokens that an image of Gemma 4 may have."""
_AS_THEY_ARE = (("mean", 0.0), ("std", 1.0))


class Form(enum.Enum):
    """WHOLE: a picture is one tile of a fixed size. SPLIT: it is cut into tiles, and one of the
    whole follows. FREE: it is one tile, of a size of its own."""

    WHOLE = "whole"
    SPLIT = "split"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class Processor:
    """The steps from a picture to square tiles of `tile_size` pixels, or to one tile of a FREE
    size.

    WHOLE: it is padded to a square with the colour `padding`, if there is one; its size becomes
    `size`, or its shorter side `shortest`; and the middle is cut out, of the size of a tile, if it
    `crops`. SPLIT: its longer side becomes `longest`, and both sides multiples of a tile's; without
    `splits` it becomes one tile. FREE: its sides become multiples of `factor`, and its pixels
    `min_pixels` to `max_pixels`, if it is not too narrow for that, or if it `fills` as many of
    `max_pixels` as its proportions allow. `filter` is Pillow's number of
    the filter that changes sizes. Values are `(pixel * scale - mean) / std`, by channel.
    """

    form: Form
    tile_size: int
    filter: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = RESCALE
    size: Size | None = None
    shortest: int = 0
    crops: bool = False
    padding: tuple[int, ...] | None = None
    longest: int = 0
    splits: bool = False
    factor: int = 0
    min_pixels: int = 0
    max_pixels: int = 0
    fills: bool = False

    @property
    def max_tiles(self) -> int:
        """The most tiles of a picture."""
        if not self.splits:
            return 1
        # The shorter side becomes even, and may so be longer than `longest`.
        side = min(self.longest + self.longest % 2, MAX_SIDE)
        num_per_side = -(-side // self.tile_size)
        return num_per_side**2 + (num_per_side > 1)

    @property
    def max_tile_pixels(self) -> int:
        """The most pixels of a tile."""
        if self.form is not Form.FREE:
            return self.tile_size**2
        if self.longest:
            return (-(-self.longest // self.factor) * self.factor) ** 2
        if self.fills:
            return self.max_pixels
        # A side may be shorter than a factor before it becomes one, and sides are rounded up in a
        # picture that becomes larger.
        shrunk, grown = (math.sqrt(MAX_RATIO * n) for n in (self.max_pixels, self.min_pixels))
        narrow = self.factor * math.ceil(shrunk)
        rounded = self.min_pixels + self.factor * (2 * math.ceil(grown) + self.factor)
        return max(self.max_pixels, narrow, rounded)

    @property
    def max_bytes(self) -> int:
        """The pixels of the largest picture, a byte for each channel."""
        return CHANNELS * self.max_tiles * self.max_tile_pixels

    def makes(self, tile: Size) -> bool:
        """Returns whether it makes tiles of this size."""
        if self.form is not Form.FREE:
            return tile == (self.tile_size, self.tile_size)
        has_factor = all(side > 0 and side % self.factor == 0 for side in tile)
        return has_factor and tile.height * tile.width <= self.max_tile_pixels

    def to_json(self) -> dict[str, Any]:
        """Returns the facts that `from_json` makes a processor of."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return values | {"form": self.form.value}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Processor:
        size, padding = found["size"], found["padding"]
        return cls(
            **dict(found)
            | {
                "form": Form(found["form"]),
                "size": None if size is None else Size(*size),
                "padding": None if padding is None else tuple(padding),
                "mean": tuple(found["mean"]),
                "std": tuple(found["std"]),
            }
        )


def has_processor(model_dir: Path) -> bool:
    """Returns whether a checkpoint has a file that may have the facts of a processor."""
    return any((model_dir / name).is_file() for name in (PREPROCESSOR, PROCESSOR))


def read_processor(model_dir: Path, form: TileForm) -> Processor:
    """Reads the facts of a checkpoint whose tower reads tiles of this form.

    Raises UnsupportedModel naming the file and the key that is missing, or not computed here.
    """
    reader = _read(model_dir)
    kind = str(reader.values.get("image_processor_type", ""))
    kind = kind.removesuffix("Pil").removesuffix("Fast")
    kinds = _SQUARES if form.tile_size else _FREE
    make = kinds.get(kind)
    if make is None:
        raise reader.unsupported("image_processor_type", f"supported are {', '.join(kinds)}")
    for key in ("do_resize", "do_rescale"):
        if not reader.flag(key, True):
            raise reader.unsupported(key, "must be true")
    if make is not _gemma4 and not reader.flag("do_normalize", True):
        raise reader.unsupported("do_normalize", "must be true")
    return make(reader, form)


class _Reader:
    """The values of an image processor, in `where`."""

    def __init__(self, values: Mapping[str, Any], where: Path) -> None:
        self.values, self._where = values, where

    def unsupported(self, key: str, reason: str) -> UnsupportedModel:
        value = self.values.get(key)
        return UnsupportedModel(f"{self._where}: {key} = {value!r}: {reason}")

    def side(self, key: str, value: Any) -> int:
        if type(value) is not int or not 0 < value <= MAX_SIDE:
            raise self.unsupported(key, f"sides must be 1 to {MAX_SIDE} pixels")
        return value

    def length(self, key: str, value: Any) -> int:
        """Returns the length that the longer side is to have, which MAX_SIDE bounds afterwards."""
        if type(value) is not int or not 0 < value < MAX_LENGTH:
            raise self.unsupported(key, f"longest_edge must be 1 to {MAX_LENGTH - 1} pixels")
        return value

    def area(self, key: str, other: str, default: Any) -> int:
        """Returns a number of pixels: the value of `key`, or else of `other`, which has
        `default`."""
        value = self.values.get(key)
        key, value = (other, default) if value is None else (key, value)
        if type(value) is not int or not 0 < value <= MAX_AREA:
            raise self.unsupported(key, f"pictures must have 1 to {MAX_AREA} pixels")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.unsupported(key, "must be true or false")
        return value

    def filter(self, default: int) -> int:
        value = self.values.get("resample")
        if value is None:
            return default
        if type(value) is not int or value not in FILTERS:
            raise self.unsupported("resample", "must be 0 to 5, as Pillow numbers filters")
        return value

    def channels(self, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
        value = self.values.get(key)
        if value is None:
            return default
        is_list = isinstance(value, list) and len(value) == CHANNELS
        if not is_list or not all(_is_number(each) and abs(each) <= 255 for each in value):
            raise self.unsupported(key, f"must be {CHANNELS} numbers, of at most 255")
        if key == "image_std" and not all(each > 0 for each in value):
            raise self.unsupported(key, "must be above 0")
        return tuple(map(float, value))

    @property
    def scale(self) -> float:
        value = self.values.get("rescale_factor")
        if value is None:
            return RESCALE
        if not _is_number(value) or not 0 < value <= 1:
            raise self.unsupported("rescale_factor", "must be above 0, and at most 1")
        return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read(model_dir: Path) -> _Reader:
    """Returns the image processor's values: of a file of its own, or a part of the processor's."""
    for name in (PREPROCESSOR, PROCESSOR):
        path = model_dir / name
        try:
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            continue
        try:
            found = json.loads(data) if len(data) <= MAX_FILE_BYTES else None
        except ValueError as error:
            raise UnsupportedModel(f"{path} is not JSON: {error}") from None
        if name == PROCESSOR and isinstance(found, dict):
            found = found.get("image_processor")
            if found is None:
                continue
        if not isinstance(found, dict):
            raise UnsupportedModel(f"{path} must have an object of at most {MAX_FILE_BYTES} bytes")
        return _Reader(found, path)
    raise UnsupportedModel(
        f"{model_dir} has no {PREPROCESSOR}, nor an image_processor in {PROCESSOR}: copy them from "
        "the model's original, or serve its text alone with --max-prompt-images 0"
    )


def _whole(reader: _Reader, tile_size: int, *, crops: bool, clip: bool) -> Processor:
    """The processors of CLIP, of SigLIP, which never crops, and of LLaVA, which may pad."""
    mean = reader.channels("image_mean", CLIP_MEAN if clip else HALF)
    std = reader.channels("image_std", CLIP_STD if clip else HALF)
    default: Any = {"shortest_edge": 224} if clip else {"height": 224, "width": 224}
    value = reader.values.get("size") or default
    if isinstance(value, int):
        value = {"shortest_edge": value} if clip else {"height": value, "width": value}
    size, shortest = None, 0
    if isinstance(value, Mapping) and value.keys() == {"shortest_edge"}:
        shortest = reader.side("size", value["shortest_edge"])
    elif isinstance(value, Mapping) and value.keys() == {"height", "width"}:
        size = Size(*(reader.side("size", value[key]) for key in ("height", "width")))
    else:
        raise reader.unsupported("size", "must have shortest_edge, or height and width")
    crops = crops and reader.flag("do_center_crop", True)
    if crops:
        cut = reader.values.get("crop_size") or {"height": 224, "width": 224}
        cut = {"height": cut, "width": cut} if isinstance(cut, int) else cut
        if not isinstance(cut, Mapping) or cut != {"height": tile_size, "width": tile_size}:
            raise reader.unsupported("crop_size", f"must be the tower's image_size, {tile_size}")
    elif size != (tile_size, tile_size):
        raise reader.unsupported("size", f"must be the tower's image_size, {tile_size}, each side")
    return Processor(
        Form.WHOLE,
        tile_size,
        reader.filter(BICUBIC),
        mean,
        std,
        reader.scale,
        size=size,
        shortest=shortest,
        crops=crops,
    )


def _clip(reader: _Reader, form: TileForm) -> Processor:
    return _whole(reader, form.tile_size, crops=True, clip=True)


def _siglip(reader: _Reader, form: TileForm) -> Processor:
    return _whole(reader, form.tile_size, crops=False, clip=False)


def _gemma3(reader: _Reader, form: TileForm) -> Processor:
    if reader.flag("do_pan_and_scan", False):
        raise reader.unsupported("do_pan_and_scan", "pictures are not cut: leave it out")
    return replace(_siglip(reader, form), filter=reader.filter(BILINEAR))


def _llava(reader: _Reader, form: TileForm) -> Processor:
    found = _clip(reader, form)
    if not reader.flag("do_pad", False):
        return found
    return replace(found, padding=tuple(int(each * 255) for each in found.mean))


def _idefics3(reader: _Reader, form: TileForm) -> Processor:
    values, tile_size = reader.values, form.tile_size
    longest, tile = (
        value.get("longest_edge") if isinstance(value, Mapping) else None
        for value in (
            values.get("size") or {"longest_edge": 4 * 364},
            values.get("max_image_size") or {"longest_edge": 364},
        )
    )
    if tile != tile_size:
        raise reader.unsupported("max_image_size", f"must be the tower's image_size, {tile_size}")
    return Processor(
        Form.SPLIT,
        tile_size,
        reader.filter(LANCZOS),
        reader.channels("image_mean", HALF),
        reader.channels("image_std", HALF),
        reader.scale,
        longest=reader.length("size", longest),
        splits=reader.flag("do_image_splitting", True),
    )


def _qwen2_vl(reader: _Reader, form: TileForm) -> Processor:
    """Older files have the bounds as `min_pixels` and `max_pixels`, which count more."""
    sides = {
        "patch_size": (14, form.patch_size),
        "merge_size": (2, form.merge),
        "temporal_patch_size": (2, form.frames),
    }
    for key, (default, own) in sides.items():
        if reader.values.get(key, default) != own:
            raise reader.unsupported(key, f"must be the tower's, {own}")
    size = reader.values.get("size") or {"shortest_edge": 56 * 56, "longest_edge": 1280 * 28 * 28}
    if not isinstance(size, Mapping):
        raise reader.unsupported("size", "must have shortest_edge and longest_edge")
    least = reader.area("min_pixels", "size", size.get("shortest_edge"))
    most = reader.area("max_pixels", "size", size.get("longest_edge"))
    if least > most:
        raise reader.unsupported("size", f"the least pixels, {least}, are more than the most")
    return replace(_free(reader, form), min_pixels=least, max_pixels=most)


def _pixtral(reader: _Reader, form: TileForm) -> Processor:
    size = reader.values.get("size") or {"longest_edge": 1024}
    if not isinstance(size, Mapping) or size.keys() != {"longest_edge"}:
        raise reader.unsupported("size", "must have longest_edge")
    patch = reader.values.get("patch_size", 16)
    own = form.patch_size
    if patch not in (own, {"height": own, "width": own}):
        raise reader.unsupported("patch_size", f"must be the tower's, {own}")
    if reader.flag("do_center_crop", False):
        raise reader.unsupported("do_center_crop", "pictures are not cut: leave it out")
    return replace(_free(reader, form), longest=reader.side("size", size["longest_edge"]))


def _gemma4(reader: _Reader, form: TileForm) -> Processor:
    """The tower itself moves values to -1 to 1."""
    mean, std = (reader.channels(f"image_{name}", (each,) * 3) for name, each in _AS_THEY_ARE)
    if reader.flag("do_normalize", False) and (mean, std) != ((0.0,) * 3, (1.0,) * 3):
        raise reader.unsupported("do_normalize", "must be false: the tower scales values itself")
    for key, own in (("patch_size", form.patch_size), ("pooling_kernel_size", form.merge)):
        if reader.values.get(key, own) != own:
            raise reader.unsupported(key, f"must be the tower's, {own}")
    most = reader.values.get("max_soft_tokens", 280)
    if type(most) is not int or most not in SOFT_TOKENS:
        raise reader.unsupported("max_soft_tokens", f"must be one of {SOFT_TOKENS}")
    if most * form.merge > form.most_per_side:
        reason = f"the tower has {form.most_per_side} positions for the patches of a side"
        raise reader.unsupported("max_soft_tokens", reason)
    found = replace(_free(reader, form), mean=HALF, std=HALF)
    return replace(found, max_pixels=most * form.cell_size**2, fills=True)


def _free(reader: _Reader, form: TileForm) -> Processor:
    """Returns the processor of tiles of any size, without bounds."""
    return Processor(
        Form.FREE,
        0,
        reader.filter(BICUBIC),
        reader.channels("image_mean", CLIP_MEAN),
        reader.channels("image_std", CLIP_STD),
        reader.scale,
        factor=form.cell_size,
    )


_SQUARES: Mapping[str, Callable[[_Reader, TileForm], Processor]] = {
    "CLIPImageProcessor": _clip,
    "SiglipImageProcessor": _siglip,
    "Gemma3ImageProcessor": _gemma3,
    "LlavaImageProcessor": _llava,
    "Idefics3ImageProcessor": _idefics3,
    "SmolVLMImageProcessor": _idefics3,
}
"""The kinds of processors that make square tiles of one size."""
_FREE: Mapping[str, Callable[[_Reader, TileForm], Processor]] = {
    "Qwen2VLImageProcessor": _qwen2_vl,
    "PixtralImageProcessor": _pixtral,
    "Gemma4ImageProcessor": _gemma4,
}
"""The kinds that make a tile of any size."""
