"""The tensors of a model's folder: found, compared with the decoder's, and read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from inference_svc.errors import UnsupportedModel
from inference_svc.model.checkpoint.files import CONFIG, GGUF, INDEX, weight_files
from inference_svc.model.checkpoint.parameters import Parameter, Piece, parameters, unused
from inference_svc.model.checkpoint.wrapper import Wrapper
from inference_svc.model.description import Decoder
from inference_svc.model.gguf import tensors as gguf
from inference_svc.model.quantised.modules import StoredModules, tensor_name
from inference_svc.model.quantised.scheme import StoredMatrix, TensorSpec

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class TextTensor:
    """A tensor of a file, as the file's header has it; `name` is its name in a model of text
    alone."""

    name: str
    stored_name: str
    path: Path
    shape: tuple[int, ...]
    dtype: str


class Stored(Protocol):
    """A tensor of a file, of which parts may be read."""

    def __getitem__(self, index: Any) -> Tensor: ...


class Source(NamedTuple):
    """A piece of a parameter, and the tensors that it is made of, by the ends of their names: one,
    "", of a plain piece, and others if the checkpoint has a `matrix` in its place."""

    parameter: Parameter
    piece: Piece
    matrix: StoredMatrix | None
    tensors: Mapping[str, TextTensor]


@contextmanager
def opened(tensor: TextTensor, *, reads_parts: bool) -> Iterator[Stored]:
    """Opens a tensor's file for as long as it is read: pages of a mapping that stays open would
    count as ours until the whole file had been read."""
    from safetensors import safe_open  # models that are made in memory do without

    if tensor.path.suffix == GGUF:
        yield gguf.GgufRows(tensor.path, tensor.stored_name)
        return
    with safe_open(tensor.path, framework="pt") as file:
        read = file.get_slice if reads_parts else file.get_tensor
        yield read(tensor.stored_name)


def every_tensor(model_dir: Path) -> list[TextTensor]:
    """Returns all tensors of a folder, other towers' too, by their own names, in the order in which
    they lie in the files. Raises UnsupportedModel for a file that cannot be read."""
    return list(_tensors(model_dir, str))


def text_tensors(model_dir: Path, wrapper: Wrapper) -> list[TextTensor]:
    """Returns the tensors of the text part, in the order in which they lie in the files. Raises
    UnsupportedModel for a file that cannot be read, and a name that is there twice."""
    found: dict[str, TextTensor] = {}
    for tensor in _tensors(model_dir, wrapper.text_name):
        if tensor.name in found:
            twice = f"{found[tensor.name].stored_name} and {tensor.stored_name}"
            raise UnsupportedModel(f"{tensor.name} is there twice, as {twice}")
        found[tensor.name] = tensor
    return list(found.values())


def _tensors(model_dir: Path, name_of: Callable[[str], str | None]) -> Iterator[TextTensor]:
    from safetensors import SafetensorError, safe_open

    for path in weight_files(model_dir):
        if path.suffix == GGUF:
            for each in gguf.tensors(path):
                yield TextTensor(each.name, each.name, path, each.shape, each.dtype)
            continue
        try:
            with safe_open(path, framework="pt") as file:
                for stored in file.offset_keys():
                    name = name_of(stored)
                    if name is None:
                        continue
                    header = file.get_slice(stored)
                    shape = tuple(header.get_shape())
                    yield TextTensor(name, stored, path, shape, header.get_dtype())
        except (OSError, SafetensorError) as error:
            raise UnsupportedModel(f"{path} cannot be read: {error}") from error


def check_tensors(model_dir: Path, decoder: Decoder) -> list[Source]:
    """Returns the sources of a decoder's weights in a model's folder, other towers' tensors aside,
    in the order in which the files have the last tensor of each. Raises UnsupportedModel naming a
    missing, unexpected or misshapen tensor."""
    tensors = text_tensors(model_dir, decoder.wrapper)
    try:
        return _sources(decoder, tensors)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{model_dir}: {error}") from None


def _sources(decoder: Decoder, tensors: list[TextTensor]) -> list[Source]:
    by_name = {tensor.name: tensor for tensor in tensors}
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    modules = None
    if decoder.quantisation is not None:
        names = {tensor.name: tensor.stored_name for tensor in tensors}
        modules = StoredModules(decoder.quantisation, decoder.wrapper, names)
    expected: dict[str, TensorSpec] = {}
    sources: list[Source] = []
    for parameter in parameters(decoder):
        for name, piece in parameter.form(shapes).items():
            matrix = _matrix(modules, piece)
            if modules is not None and piece.module:
                _check_format(piece, matrix)
            specs = _specs(name, piece, matrix)
            expected |= dict(specs.values())
            found = {end: by_name[full] for end, (full, _) in specs.items() if full in by_name}
            sources.append(Source(parameter, piece, matrix, found))
    _check(by_name, expected, unused(decoder))
    places = {tensor.name: place for place, tensor in enumerate(tensors)}
    sources.sort(key=lambda each: max(places[one.name] for one in each.tensors.values()))
    return sources


def _matrix(modules: StoredModules | None, piece: Piece) -> StoredMatrix | None:
    """Returns the form of a piece's weight where it is not plain."""
    if modules is None or not piece.module:
        return None
    return modules.matrix(piece.module, *piece.sizes, piece.num_experts)


def _check_format(piece: Piece, matrix: StoredMatrix | None) -> None:
    """Raises UnsupportedModel if the files have a weight in another format than their index says,
    by which the model was described."""
    if piece.format != (None if matrix is None else matrix.format):
        raise UnsupportedModel(
            f"{piece.module} has other tensors in the files than in {INDEX}: are both of one "
            "checkpoint?"
        )


def _specs(
    name: str, piece: Piece, matrix: StoredMatrix | None
) -> Mapping[str, tuple[str, TensorSpec]]:
    """Returns the tensors that a piece is made of, with their whole names, by their ends."""
    if matrix is None:
        return {"": (name, TensorSpec(piece.shape, FLOAT_DTYPES))}
    found = matrix.tensors.items()
    return {end: (tensor_name(piece.module, end), spec) for end, spec in found}


def _check(
    tensors: Mapping[str, TextTensor], expected: Mapping[str, TensorSpec], unused: tuple[str, ...]
) -> None:
    needed = {name for name, spec in expected.items() if not spec.is_optional}
    missing = sorted(needed - tensors.keys())
    others = (name for name in tensors.keys() - expected.keys() if not name.startswith(unused))
    unexpected = sorted(name for name in others if not _is_ignored(name))
    for what, found in (("missing", missing), ("unexpected", unexpected)):
        if found:
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            raise UnsupportedModel(
                f"{what} tensors: {', '.join(found[:5])}{more}; is {CONFIG} of another model than "
                "the weights, or was a merged model saved under other names? Save both with "
                "save_pretrained"
            )
    for name, tensor in tensors.items():
        if name in expected:
            _check_tensor(tensor, expected[name])


def _check_tensor(tensor: TextTensor, spec: TensorSpec) -> None:
    if not spec.fits(tensor.shape):
        raise UnsupportedModel(
            f"{tensor.name} has shape {list(tensor.shape)}, but config.json says {spec.sizes}"
        )
    if tensor.dtype not in spec.dtypes:
        raise UnsupportedModel(
            f"{tensor.name} has dtype {tensor.dtype}; supported are "
            f"{', '.join(spec.dtypes)}{_remedy(spec)}"
        )


def _remedy(spec: TensorSpec) -> str:
    """Returns the words after the dtypes of a tensor that is of another."""
    if spec.dtypes != FLOAT_DTYPES:
        return ""
    return (
        ": config.json has no quantization_config that covers it, or the files lack its scales; "
        "dequantise the weights first"
    )


def _is_ignored(name: str) -> bool:
    """Returns whether old files hold it unused: rotary frequencies, or the head of a tied model."""
    return name == "lm_head.weight" or name.endswith(".rotary_emb.inv_freq")
