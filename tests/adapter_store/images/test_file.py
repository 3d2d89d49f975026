"""Image files: standard tools open them, and no damage goes unnoticed."""

import dataclasses
import os
import shutil
import subprocess

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from adapter_store.checkpoint.open import TORCH_DTYPES, open_checkpoint
from adapter_store.errors import CorruptData
from adapter_store.images.compile import Image, compile_image
from adapter_store.images.tiers.file import read_image, remove_image, sha256_path, write_image
from contract.images.dtypes import DataType


@pytest.fixture
def image(make_adapter, make_layout) -> Image:
    folder = make_adapter(("q_proj", "embed_tokens", "down_proj"), rank=3)
    return compile_image(open_checkpoint(folder), make_layout(DataType.BFLOAT16))


@pytest.fixture
def path(tmp_path, image):
    path = tmp_path / "image.safetensors"
    write_image(path, image)
    return path


def test_reads_back_what_was_written(path, image):
    again = read_image(path, image.plan)
    assert torch.equal(again.buffer, image.buffer)
    assert again.parts == image.parts
    assert again.sha256 == image.sha256


def test_reads_into_a_given_buffer(path, image):
    buffer = torch.full((image.plan.total_bytes,), 0xFF, dtype=torch.uint8)
    assert read_image(path, image.plan, buffer).buffer is buffer
    assert torch.equal(buffer, image.buffer)


def test_safetensors_opens_it(path, image):
    tensors = load_file(path)
    assert set(image.plan.names) <= tensors.keys()
    for name, shape, segment in zip(
        image.plan.names, image.plan.shapes, image.plan.segments, strict=True
    ):
        data = image.buffer[segment.offset : segment.offset + segment.length_bytes]
        expected = data.view(TORCH_DTYPES[image.plan.dtype]).view(shape)
        assert torch.equal(tensors[name], expected)
    pads = tensors.keys() - set(image.plan.names)
    assert pads == {f"_pad.{number}" for number in range(len(pads))}
    assert all(not tensors[pad].any() for pad in pads)
    with safe_open(path, "pt") as file:
        assert file.metadata()["loadout.image_id"] == image.plan.image_id


def test_data_starts_on_a_page_and_is_the_image(path, image):
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    assert start % 4096 == 0
    assert data[start:] == image.buffer.numpy().tobytes()


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_sha256sum_agrees(path):
    checksum = sha256_path(path)
    assert checksum.name == "image.safetensors.sha256"
    subprocess.run(
        ["sha256sum", "--check", "--strict", checksum.name],
        cwd=path.parent,
        check=True,
        capture_output=True,
    )


def test_every_flipped_byte_is_noticed(path, image):
    original = path.read_bytes()
    start = len(original) - image.plan.total_bytes
    positions = [0, 1, 7, 8, 9, start // 2, start - 1, start, start + 100, start + 255]
    positions += [*range(10, len(original), 487), len(original) - 1]
    for position in positions:
        damaged = bytearray(original)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(CorruptData) as error:
            read_image(path, image.plan)
        assert error.value.subject == path.name


@pytest.mark.parametrize("change", [-1, -5000, 1, 4096])
def test_wrong_length_is_noticed(path, image, change):
    os.truncate(path, path.stat().st_size + change)
    with pytest.raises(CorruptData):
        read_image(path, image.plan)


def test_swapped_parts_are_noticed(path, image):
    original = path.read_bytes()
    start = len(original) - image.plan.total_bytes
    (_, first, second, *_) = image.plan.parts
    assert first[1] - first[0] == second[1] - second[0]
    data = bytearray(original)
    data[start + first[0] : start + first[1]] = original[start + second[0] : start + second[1]]
    data[start + second[0] : start + second[1]] = original[start + first[0] : start + first[1]]
    path.write_bytes(data)
    with pytest.raises(CorruptData):
        read_image(path, image.plan)


@pytest.mark.parametrize("field", ["image_id", "digest", "layout_id"])
def test_another_image_is_not_accepted(path, image, field):
    other = dataclasses.replace(image.plan, **{field: "sha256:" + "0" * 64})
    with pytest.raises(CorruptData):
        read_image(path, other)


def test_missing_file(tmp_path, image):
    with pytest.raises(FileNotFoundError):
        read_image(tmp_path / "absent", image.plan)


def test_writing_again_replaces_and_leaves_nothing_behind(path, image):
    path.write_bytes(b"old")
    write_image(path, image)
    assert read_image(path, image.plan).parts == image.parts
    names = {file.name for file in path.parent.iterdir() if file.is_file()}
    assert names == {path.name, sha256_path(path).name}
    remove_image(path)
    remove_image(path)
    assert not any(file.is_file() for file in path.parent.iterdir())


def test_failed_write_leaves_the_old_file(path, image, monkeypatch):
    before = path.read_bytes()

    def no_space(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        write_image(path, image)
    assert path.read_bytes() == before
    assert not list(path.parent.glob(".*.tmp"))
