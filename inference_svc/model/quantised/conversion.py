"""Writes a plain checkpoint anew, with the weights of its layers in few bits.

The format is compressed-tensors, which vLLM, SGLang and transformers read:
https://github.com/neuralmagic/compressed-tensors. INT4 and INT8 are packed in int32, the first
input in the lowest bits, and offset by half their range; FP8 weights are as they are.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from inference_svc.errors import UnsupportedModel
from inference_svc.model.architectures import load_description
from inference_svc.model.checkpoint.files import CONFIG, INDEX, read_json
from inference_svc.model.checkpoint.tensors import check_tensors, every_tensor, opened
from kernels.quantised import Codes, QuantisedRows, WeightFormat, quantise

SHARD_BYTES = 2 << 30
"""The least bytes of a file but the last, which is all that is held at once beside one tensor."""
BLOCK_ELEMENTS = 1 << 24
"""Elements of a tensor that are quantised at once."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")


def convert(model_dir: Path, out: Path, codes: str, report: Callable[[int, int], None]) -> None:
    """Writes the model with layers in "int4", "int8" or "fp8" to the folder `out`.

    Args:
        model_dir: The folder of a plain checkpoint.
        out: A folder that does not exist yet. It appears when all of it is written.
        codes: The type of the weights.
        report: Called with the number of tensors that are done, and of all.

    Raises:
        UnsupportedModel: The model cannot be read or is quantised already, its experts lie in one
            tensor, or its weights are not finite.
        OSError: `out` exists or cannot be written.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists: choose a folder that does not, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
        folder = Path(temporary) / out.name
        folder.mkdir()
        try:
            _write(model_dir, folder, codes, report)
        except SafetensorError as error:  # also for a full disk
            raise OSError(f"{out} cannot be written: {error}") from error
        folder.rename(out)


def _write(model_dir: Path, folder: Path, codes: str, report: Callable[[int, int], None]) -> None:
    formats = _formats(model_dir, codes)
    tensors = every_tensor(model_dir)
    writer = _Writer(folder)
    ignored: list[str] = []
    for done, tensor in enumerate(tensors):
        report(done, len(tensors))
        module = tensor.stored_name.removesuffix(".weight")
        with opened(tensor, reads_parts=True) as stored:
            form = formats.get(tensor.stored_name)
            if form is None:
                writer.add(tensor.stored_name, stored[:])
                is_matrix = len(tensor.shape) == 2 and module != tensor.stored_name
                ignored += [module] if is_matrix else []
            else:
                rows = QuantisedRows.cat(list(_quantised(stored, tensor.shape, form)))
                if not rows.scales.isfinite().all():
                    raise UnsupportedModel(f"{tensor.stored_name} has NaN or infinite values")
                for end, value in _stored(rows).items():
                    writer.add(f"{module}.{end}", value)
    writer.finish()
    used = set(formats.values())
    assert len(used) == 1, "one format for all"
    config = read_json(model_dir / CONFIG)
    config["quantization_config"] = _described(used.pop(), ignored)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    for path in sorted(model_dir.iterdir()):
        is_other = path.name not in (CONFIG, INDEX) and path.suffix not in _WEIGHTS
        if path.is_file() and is_other:
            shutil.copyfile(path, folder / path.name)
    report(len(tensors), len(tensors))


def _formats(model_dir: Path, codes: str) -> Mapping[str, WeightFormat]:
    """Returns the format of each tensor that is to be quantised, by its name in the files."""
    formats: dict[str, WeightFormat] = {}
    for source in check_tensors(model_dir, load_description(model_dir, codes)):
        piece = source.piece
        if piece.format is None or not piece.module:
            continue
        if piece.num_experts:
            raise UnsupportedModel(
                f"{piece.module} has all experts in one tensor, which compressed-tensors has no "
                f"form for; serve the plain model with --quantize {codes} instead"
            )
        formats[source.tensors[""].stored_name] = piece.format
    return formats


def _quantised(stored: Any, shape: tuple[int, ...], form: WeightFormat) -> Iterator[QuantisedRows]:
    step = max(1, BLOCK_ELEMENTS // shape[1])
    for start in range(0, shape[0], step):
        yield quantise(stored[start : start + step], form)


def _stored(rows: QuantisedRows) -> Mapping[str, Tensor]:
    """Returns the tensors of a weight by the ends of their names."""
    form, scales = rows.format, rows.scales
    if form.codes is Codes.FP8:
        return {"weight": rows.codes.view(torch.float8_e4m3fn), "weight_scale": scales}
    num_bits = form.codes.num_bits
    # A code of INT4 is offset already.
    codes = rows.codes if num_bits == 4 else rows.codes ^ 128
    shape = torch.tensor(codes.shape)
    return {"weight_packed": packed(codes, num_bits), "weight_scale": scales, "weight_shape": shape}


def packed(codes: Tensor, num_bits: int) -> Tensor:
    """Packs codes, uint8 [N, in], in int32 [N, ceil(in * num_bits / 32)], the first in the lowest
    bits."""
    per_word = 32 // num_bits
    padding = -codes.shape[1] % per_word
    padded = torch.nn.functional.pad(codes, (0, padding))
    if num_bits == 4:
        padded = padded[:, ::2] | (padded[:, 1::2] << 4)
    return padded.contiguous().view(torch.int32)


def _described(form: WeightFormat, ignored: list[str]) -> dict[str, Any]:
    """Returns the quantization_config."""
    is_float = form.codes is Codes.FP8
    weights = {
        "num_bits": form.codes.num_bits,
        "type": "float" if is_float else "int",
        "symmetric": True,
        "strategy": "group" if form.group_size else "channel",
        "group_size": form.group_size or None,
        "dynamic": False,
        "observer": "minmax",
    }
    layers = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    name = "float-quantized" if is_float else "pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": layers | {"output_activations": None, "format": name}},
        "ignore": sorted(ignored),
        "kv_cache_scheme": None,
    }


class _Writer:
    """Writes tensors to files of about SHARD_BYTES, and then the index of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, Tensor] = {}
        self._num_bytes = self._total_bytes = 0
        self._names: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        self._tensors[name] = tensor.contiguous()
        self._num_bytes += tensor.nbytes
        if self._num_bytes >= SHARD_BYTES:
            self._flush()

    def _flush(self) -> None:
        path = self._folder / f"{len(self._names)}.part"
        save_file(self._tensors, path, metadata={"format": "pt"})
        self._names.append(list(self._tensors))
        self._total_bytes += self._num_bytes
        self._tensors, self._num_bytes = {}, 0

    def finish(self) -> None:
        """Gives the files their names, and writes the index of several."""
        if self._tensors:
            self._flush()
        count = len(self._names)
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._names):
            name = f"model-{index + 1:05}-of-{count:05}.safetensors"
            name = "model.safetensors" if count == 1 else name
            part = self._folder / f"{index}.part"
            part.chmod(0o644)  # safetensors writes for the owner alone
            part.rename(self._folder / name)
            weight_map |= dict.fromkeys(names, name)
        if count > 1:
            values = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self._folder / INDEX).write_text(json.dumps(values, indent=2) + "\n")
