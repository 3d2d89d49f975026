"""Pictures become the tiles that transformers' processors make; hostile files are refused."""

from __future__ import annotations

import os
import re
import resource
import signal
import struct
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from inference_svc.model.tower import normalised
from inference_svc.pictures import decoding
from inference_svc.pictures.decoding import PictureDecoder, Tiles
from inference_svc.pictures.processor import Form, Processor, read_processor
from servicekit.errors import InvalidArgument, ServiceError, Unavailable
from tests.support.pictures.files import encoded, packed_png, picture, png, with_long_header
from tests.support.pictures.models import (
    GEMMA4,
    NAMES,
    PATCH,
    TILE,
    cell_patches,
    image_processor,
    save_processor,
    tile_form,
)

pytestmark = pytest.mark.processes

WHERE = "messages[0].content[1].image_url"


@pytest.fixture(scope="module")
def decoder_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`decoder_of(name, **changes)`: a model's processor, with these values in its file."""
    decoders: list[PictureDecoder] = []

    def make(name: str, **changes: Any) -> tuple[PictureDecoder, Processor]:
        folder = tmp_path_factory.mktemp("processor")
        save_processor(name, folder, **changes)
        processor = read_processor(folder, tile_form(name))
        decoders.append(PictureDecoder(processor))
        return decoders[-1], processor

    yield make
    for each in decoders:
        each.close()


@pytest.fixture(scope="module")
def llava(decoder_of: Any) -> tuple[PictureDecoder, Processor]:
    return decoder_of("Llava")


def values(tiles: Tiles, processor: Processor) -> torch.Tensor:
    """[tiles, 3, height, width]; of tiles of any size [patches, 3, side, side], cell by cell."""
    shape = tiles.num_tiles, *tiles.tile, 3
    pixels = np.frombuffer(tiles.pixels.view, np.uint8).reshape(shape)
    found = normalised(torch.from_numpy(pixels.copy()), processor)
    if processor.form is not Form.FREE:
        return found
    return cell_patches(found[0])


def expected_values(found: Image.Image, name: str, **changes: Any) -> torch.Tensor:
    oracle = image_processor(name, **changes)
    inputs = oracle(images=[found], return_tensors="pt")
    made = inputs["pixel_values"]
    if name in GEMMA4:
        return filled_values(made[0], inputs["image_position_ids"][0])
    if "Qwen" in name:
        patches = made.unflatten(1, (3, 2, PATCH, PATCH))
        assert torch.equal(patches[:, :, 0], patches[:, :, 1]), "both frames are the picture"
        return patches[:, :, 0]
    if name == "Mistral3":
        return cell_patches(made[0])
    return made.flatten(0, -4).float()


def filled_values(patches: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Returns Gemma 4's patches, cell by cell, as its tower moves their values to -1 to 1."""
    is_there = (places >= 0).all(1)
    columns, rows = (places[is_there].max(0).values + 1).tolist()
    grid = patches[is_there].view(rows, columns, PATCH, PATCH, 3)
    return cell_patches(grid.permute(4, 0, 2, 1, 3).flatten(3).flatten(1, 2).float() * 2 - 1)


SIZES = [(28, 28), (29, 31), (100, 28), (28, 100), (7, 5), (1, 1), (200, 133), (3, 60), (90, 91)]


@pytest.mark.parametrize("name", NAMES)
def test_tiles_equal_transformers(name: str, decoder_of: Any) -> None:
    decoder, processor = decoder_of(name)
    for width, height in SIZES:
        found = picture(width, height)
        tiles = decoder.decode(encoded(found), WHERE)
        expected = expected_values(found, name)
        assert decoder.measure(encoded(found), WHERE) == tiles.pixels.num_bytes
        assert tiles.num_tiles == tiles.rows * tiles.columns + 1
        assert processor.makes(tiles.tile)
        made = values(tiles, processor)
        assert made.shape == expected.shape, (width, height)
        assert (made - expected).abs().max() <= 1e-6, (width, height)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Llava", {"image_processor_type": "LlavaImageProcessor", "do_pad": True}),
        ("Llava", {"image_processor_type": "LlavaImageProcessor"}),
        ("Llava", {"resample": 2, "size": {"shortest_edge": 20}}),
        ("Llava", {"size": {"height": 31, "width": 44}}),
        ("Llava", {"do_center_crop": False, "size": {"height": TILE, "width": TILE}}),
        ("LlavaOfSiglip", {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}),
        ("LlavaOfSiglip", {"rescale_factor": 0.003}),
        ("Idefics3", {"do_image_splitting": False}),
        ("Idefics3", {"size": {"longest_edge": 2000}, "resample": 3}),
        ("SmolVLM", {"size": {"longest_edge": TILE}}),
        ("Qwen2_5_VL", {"size": {"shortest_edge": 200 * 200, "longest_edge": 300 * 300}}),
        ("Qwen2_5_VL", {"size": {"shortest_edge": 1, "longest_edge": 28 * 28}}),
        ("Qwen2VL", {"min_pixels": 100 * 100, "resample": 1}),
        ("Mistral3", {"size": {"longest_edge": 43}, "resample": 2}),
        ("Gemma4", {"max_soft_tokens": 140, "resample": 2}),
    ],
)
def test_processors_may_differ(name: str, changes: dict[str, Any], decoder_of: Any) -> None:
    decoder, processor = decoder_of(name, **changes)
    for width, height in ((64, 41), (20, 55)):
        found = picture(width, height)
        tiles = decoder.decode(encoded(found), WHERE)
        expected = expected_values(found, name, **changes)
        assert tiles.num_tiles <= processor.max_tiles
        made = values(tiles, processor)
        assert made.shape == expected.shape
        assert (made - expected).abs().max() <= 1e-6


@pytest.mark.parametrize(
    ("width", "height", "fits"), [(6000, 4000, True), (4000, 8000, True), (12_000, 2700, False)]
)
def test_photos_are_padded_to_squares(width: int, height: int, fits: bool, decoder_of: Any) -> None:
    """Their squares may have more pixels than a file may."""
    kind = {"image_processor_type": "LlavaImageProcessor", "do_pad": True}
    decoder, _ = decoder_of("Llava", **kind)
    photo = encoded(Image.new("RGB", (width, height)), "JPEG")
    if fits:
        assert decoder.decode(photo, WHERE).num_tiles == 1
        return
    with pytest.raises(InvalidArgument, match="long and narrow for its size"):
        decoder.decode(photo, WHERE)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        *product(["L", "LA", "RGB", "RGBA", "P", "1"], ["PNG", "WEBP", "GIF"]),
        *product(["L", "RGB", "1", "CMYK"], ["JPEG"]),
        ("CMYK", "WEBP"),
    ],
)
def test_modes_are_converted_as_pillow_does(mode: str, kind: str, llava: Any) -> None:
    """Each mode of each kind of file that has it."""
    decoder, processor = llava
    data = encoded(picture(40, 35, mode), kind)
    read = Image.open(BytesIO(data))
    tiles = decoder.decode(data, WHERE)
    assert (values(tiles, processor) - expected_values(read, "Llava")).abs().max() <= 1e-6


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_data_turn_a_picture(orientation: int, llava: Any) -> None:
    decoder, processor = llava
    found = picture(50, 30)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(found, "JPEG", exif=exif, quality=95)
    turned = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    tiles = decoder.decode(data, WHERE)
    assert (values(tiles, processor) - expected_values(turned, "Llava")).abs().max() <= 1e-6
    straight = expected_values(Image.open(BytesIO(data)), "Llava")
    is_same = (values(tiles, processor) - straight).abs().max() <= 1e-6
    assert is_same == (orientation == 1)


def _png_of(width: int, height: int, data: bytes = zlib.compress(bytes(1000))) -> bytes:
    """A PNG file whose header says this size, and which has next to no data."""
    return packed_png(width, height, 8, 2, data)


def _png_with(bits: int, colour_type: int) -> bytes:
    """A PNG file of 9 x 9 pixels with so many bits a channel."""
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[colour_type]
    return png(9, 9, bits, colour_type, (b"\0" + b"\x9c\x40" * (9 * channels * bits // 16)) * 9)


def _black(width: int, height: int) -> bytes:
    """Returns the data of a black PNG file, of one compressed piece again and again."""
    num_bytes, piece = height * (1 + 3 * width), 1 << 20
    packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    again = packer.compress(bytes(piece)) + packer.flush(zlib.Z_FULL_FLUSH)
    rest = packer.compress(bytes(num_bytes % piece)) + packer.flush()
    checksum = struct.pack(">I", num_bytes % 65_521 << 16 | 1)
    return b"\x78\xda" + again * (num_bytes // piece) + rest + checksum


def _animated(kind: str) -> bytes:
    frames = [picture(8, 8, seed=seed) for seed in (1, 2, 3)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:])


HOSTILE = {
    "empty": (b"", "no picture"),
    "text": (b"not a picture", "no picture"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no picture"),
    "pdf": (b"%PDF-1.7\n%%EOF", "no picture"),
    "bmp": (encoded(picture(8, 8), "BMP"), "no picture"),
    "tiff": (encoded(picture(8, 8), "TIFF"), "no picture"),
    "truncated png": (encoded(picture(90, 90))[:3000], "cannot be decoded"),
    "truncated jpeg": (encoded(picture(90, 90), "JPEG")[:900], "cannot be decoded"),
    "truncated webp": (encoded(picture(90, 90), "WEBP")[:900], "cannot be decoded|no picture"),
    "a billion pixels": (_png_of(32_768, 32_768), "32768 x 32768 pixels"),
    "one row of pixels too many": (_png_of(1 << 13, (1 << 12) + 1), "pixels"),
    "a gif without its end": (encoded(picture(8, 8), "GIF")[:-1] + b"\xfe!", "cannot be decoded"),
    "a gif with half a frame": (encoded(picture(8, 8), "GIF")[:-1] + b",ab", "cannot be decoded"),
    "a header without data": (_png_of(100, 100), "cannot be decoded"),
    "too long and narrow": (encoded(picture(100_000, 1)), "long and narrow"),
    "animated gif": (_animated("GIF"), "animated"),
    "animated png": (_animated("PNG"), "animated"),
    "animated webp": (_animated("WEBP"), "animated"),
    **{
        f"16 bit, colour type {each}": (_png_with(16, each), "has over 8 bits a channel: save it")
        for each in (0, 2, 4, 6)
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name: str, llava: Any) -> None:
    data, words = HOSTILE[name]
    with pytest.raises(InvalidArgument, match=words) as refused:
        llava[0].decode(data, WHERE)
    assert refused.value.subject == WHERE
    assert refused.value.message.startswith(f"{WHERE}: ")


@pytest.mark.parametrize(
    "name", ["empty", "a billion pixels", "too long and narrow", "16 bit, colour type 2"]
)
def test_headers_are_refused_before_memory_is_taken(name: str, llava: Any) -> None:
    data, words = HOSTILE[name]
    with pytest.raises(InvalidArgument, match=f"^{re.escape(WHERE)}: .*{words}"):
        llava[0].measure(data, WHERE)


def test_a_picture_and_an_archive_is_the_picture(llava: Any) -> None:
    """Bytes behind the end of a picture have no effect."""
    data = encoded(picture(30, 30))
    assert llava[0].decode(data + b"PK\x03\x04" * 50, WHERE) == llava[0].decode(data, WHERE)


def test_a_bomb_ends_its_process_and_the_next_picture_is_decoded(
    monkeypatch: pytest.MonkeyPatch, decoder_of: Any
) -> None:
    """100 million pixels in 100 kB: the process has less memory than they take."""
    decoder, _ = decoder_of("Llava")
    bomb = _png_of(20_000, 15_000, _black(20_000, 15_000))
    assert len(bomb) < 1 << 20
    assert not any(Image.open(BytesIO(_png_of(900, 500, _black(900, 500)))).tobytes())
    monkeypatch.setattr(decoding, "MAX_PIXELS", 1 << 30)
    with pytest.raises(InvalidArgument, match="MiB to decode"):
        decoder.decode(bomb, WHERE)
    assert decoder.decode(encoded(picture(30, 30)), WHERE).num_tiles == 1


@pytest.mark.parametrize(
    ("signals", "error", "words"),
    [
        ((signal.SIGKILL,), Unavailable, "try again"),
        ((signal.SIGSEGV, signal.SIGCONT), InvalidArgument, "cannot be decoded"),
        ((), Unavailable, "try again$"),
    ],
    ids=["killed", "crashed", "without turns"],
)
def test_a_process_that_gives_no_answer_says_whose_fault_it_is(
    signals: tuple[int, ...],
    error: type[ServiceError],
    words: str,
    decoder_of: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process is stopped as it is asked, and ends by these signals, or not in time."""
    if not signals:
        limits = replace(decoding.TASK.limits, wall_seconds=0.2)
        monkeypatch.setattr(decoding, "TASK", replace(decoding.TASK, limits=limits))
    decoder, _ = decoder_of("Llava")
    with decoder.pool.process() as child:
        os.kill(child.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        decoding_it = threads.submit(decoder.decode, encoded(picture(30, 30)), WHERE)
        while decoder.pool.idle:
            time.sleep(0.001)
        for each in signals:
            os.kill(child.pid, each)
        with pytest.raises(error, match=words) as refused:
            decoding_it.result()
    assert refused.value.subject == WHERE


def test_a_file_that_takes_too_much_work_is_refused(
    decoder_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its work is charged all the same."""
    limits = replace(decoding.TASK.limits, answer_cpu_seconds=0.01)
    monkeypatch.setattr(decoding, "TASK", replace(decoding.TASK, limits=limits))
    decoder, _ = decoder_of("Llava")
    charged: list[float] = []
    with pytest.raises(InvalidArgument, match=r"s of a processor .*send a smaller image"):
        decoder.decode(with_long_header(picture(30, 30)), WHERE, charge=charged.append)
    assert sum(charged) > 0.01


def test_a_header_that_takes_too_much_work_is_refused(
    llava: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before a decoding would be; its work is charged all the same. Loading a process is no
    work of a header."""
    usual, long = encoded(picture(30, 30), "JPEG"), with_long_header(picture(30, 30))
    monkeypatch.setattr(decoding, "HEADER_CPU_SECONDS", 0.1)
    charged: list[float] = []
    for _ in range(2):  # the second time there is no process
        with pytest.raises(InvalidArgument, match="its header is too long") as refused:
            llava[0].measure(long, WHERE, charge=charged.append)
        assert refused.value.subject == WHERE
    assert 0.1 < sum(charged) < decoding.CPU_SECONDS / 2
    assert llava[0].measure(usual, WHERE) > 0


def test_without_files_it_is_said_when_to_try_again(decoder_of: Any) -> None:
    """A process, its memory and the tiles take some each."""
    decoder, _ = decoder_of("Llava")
    data = encoded(picture(30, 30))
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    for prepare in (lambda: None, lambda: decoder.decode(data, WHERE)):
        prepare()  # the second time there is a process
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, usual[1]))
        try:
            with pytest.raises(Unavailable, match=r"Too many open files: try again$") as refused:
                decoder.decode(data, WHERE)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        assert refused.value.subject == WHERE
        assert refused.value.retry_after_s == decoding.RETRY_SECONDS


def test_a_process_keeps_no_pixels(decoder_of: Any) -> None:
    """Of one tenant, while it waits for the file of the next one."""
    decoder, _ = decoder_of("Llava")
    tiles = decoder.decode(encoded(picture(30, 30)), WHERE)
    assert any(tiles.pixels.view)
    [child] = decoder.pool.idle
    assert child.memory is not None
    assert not any(child.memory.view)


def test_pictures_that_differ_have_different_digests(llava: Any) -> None:
    one, other = (encoded(picture(30, 30, seed=seed)) for seed in (0, 1))
    digests = [llava[0].decode(data, WHERE).digest for data in (one, other, one)]
    assert digests[0] == digests[2] != digests[1]
