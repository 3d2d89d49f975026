"""Reads a model directory's safetensors into the decoder's buffers, in one pass.

Each tensor is read once, in the order of its file, and goes to its place at once: into the form
that a backend computes with, of a projection too. There is no second copy of anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from inference_svc.errors import UnsupportedModel
from inference_svc.model.checkpoint.files import CONFIG, weight_files
from inference_svc.model.checkpoint.parameters import (
    Parameter,
    Piece,
    Role,
    has_values,
    parameters,
    role_of,
    unused,
)
from inference_svc.model.checkpoint.wrapper import Wrapper
from inference_svc.model.description import Attention, Decoder, Norm, NormKind
from inference_svc.model.layers import Linear
from inference_svc.model.operations import (
    EMBEDDING_KEY,
    HEAD_KEY,
    Logits,
    Numbers,
    Scalar,
    Weight,
    WeightSpec,
    norm_key,
    weight_key,
)
from inference_svc.model.walk import operations, weights_of
from kernels.attention import HeadNorms
from kernels.elementwise import NormWeight

_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


class Packed(Protocol):
    """A projection's weight in the form that a backend computes with."""

    @property
    def num_bytes(self) -> int: ...

    def put_rows(self, start: int, rows: Tensor) -> None:
        """Takes rows [N, in] of a file, of any float dtype, as the rows from `start` on."""

    def put_bias(self, start: int, values: Tensor) -> None:
        """Takes values [N] of a file, of any float dtype, as the bias's from `start` on."""


P = TypeVar("P", bound=Packed)
P_co = TypeVar("P_co", bound=Packed, covariant=True)


class Projections(Protocol[P_co]):
    """Makes a backend's projections."""

    def empty(
        self,
        out_features: int,
        in_features: int,
        *,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> P_co:
        """Allocates one whose rows are put later, each once, in any order."""

    def of(self, weight: Tensor) -> P_co:
        """Returns a projection of a weight [out, in] that stays where it is, and may be shared."""


@dataclass(frozen=True, slots=True)
class ModelWeights(Generic[P]):
    """All weights of a decoder, by the keys of its parameters. `num_bytes` counts bytes in memory:
    a tied head that shares the embedding's tensor is counted once.

    `tables` are [rows, size] in the model's dtype, `numbers` fp32 [size]; `projections` have the
    head's even if it is tied, and `norms` have one for every norm of the decoder.
    """

    tables: Mapping[str, Tensor]
    projections: Mapping[str, P]
    norms: Mapping[str, NormWeight]
    scalars: Mapping[str, float]
    numbers: Mapping[str, Tensor]
    num_bytes: int

    @classmethod
    def made(
        cls, decoder: Decoder, make: Callable[[WeightSpec], Any], num_bytes: int = 0
    ) -> ModelWeights[P]:
        """Returns weights that are made one by one, of a tied head too."""
        of_role: dict[Role, dict[str, Any]] = {role: {} for role in Role}
        head = operations(decoder).head[-1]
        assert isinstance(head, Logits)
        for weight in (*weights_of(decoder), Weight(head.projection, None)):
            of_kind = of_role[role_of(weight.spec)]
            key = weight_key(weight)
            if key not in of_kind:
                of_kind[key] = make(weight.spec)
        return cls.of_roles(of_role, num_bytes)

    @classmethod
    def of_roles(cls, made: Mapping[Role, dict[str, Any]], num_bytes: int) -> ModelWeights[P]:
        """Returns weights by the roles of their parameters."""
        return cls(
            tables=made[Role.TABLE],
            projections=made[Role.PROJECTION],
            norms=made[Role.NORM],
            scalars=made[Role.SCALAR],
            numbers=made[Role.NUMBERS],
            num_bytes=num_bytes,
        )

    @property
    def embedding(self) -> Tensor:
        """[vocab_size, hidden_size]"""
        return self.tables[EMBEDDING_KEY]

    def norm(self, norm: Norm | None, layer: int | None) -> NormWeight | None:
        """Returns the weight of a norm of a layer or, None, of the whole model."""
        return None if norm is None else self.norms[norm_key(norm, layer)]

    def numbers_of(self, spec: Numbers | None) -> Tensor | None:
        """Returns fp32 [size]; None for None."""
        return None if spec is None else self.numbers[spec.name]

    def scale(self, scale: float | Scalar) -> float:
        """Returns a number that may be a weight."""
        return self.scalars[scale.name] if isinstance(scale, Scalar) else scale

    def head_norms(self, attention: Attention, layer: int | None) -> HeadNorms:
        """Returns the norms of queries, keys and values."""
        norms = (attention.q_norm, attention.k_norm, attention.v_norm)
        found = [self.norm(each, layer) for each in norms]
        [eps] = {norm.eps for norm in found if norm is not None} or {0.0}
        q, k, v = (None if norm is None else norm.weight for norm in found)
        return HeadNorms(q, k, v, eps, attention.norms_rotated)


def load_weights(
    model_dir: Path,
    decoder: Decoder,
    dtype: torch.dtype,
    device: torch.device | str,
    projections: Projections[P],
) -> ModelWeights[P]:
    """Reads `model.safetensors`, or the shards of `model.safetensors.index.json`, cast to `dtype`.

    Allocates nothing but the weights, and holds pages of one tensor of a file at a time, which are
    the system's to take back. Raises as `check_tensors`, before anything large is allocated.
    """
    from safetensors import safe_open  # models that are made in memory do without

    tensors = check_tensors(model_dir, decoder)
    assembly = _Assembly(decoder, dtype, torch.device(device), projections)
    for tensor in tensors:
        if tensor.name in assembly:
            # Opened for each tensor anew: pages of a mapping that stays open would count as ours
            # until the whole file had been read.
            with safe_open(tensor.path, framework="pt") as file:
                read = file.get_slice if assembly.reads_parts(tensor.name) else file.get_tensor
                assembly.add(tensor.name, read(tensor.stored_name))
    return assembly.finish()


def check_tensors(model_dir: Path, decoder: Decoder) -> list[TextTensor]:
    """Returns the tensors of a model directory without other towers' tensors, in the order in which
    they lie in its files. Raises UnsupportedModel naming a missing, unexpected or misshapen one."""
    tensors = _tensors(model_dir, decoder.wrapper)
    try:
        _check(tensors, parameters(decoder), unused(decoder))
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{model_dir}: {error}") from None
    return tensors


class Stored(Protocol):
    """A tensor of a file, of which parts may be read."""

    def __getitem__(self, index: Any) -> Tensor: ...


@dataclass(eq=False, slots=True)
class _Reading:
    """A parameter that is being read: `left` are the tensors that are still to come."""

    made: Any
    left: dict[str, Piece]


class _Assembly(Generic[P]):
    """Puts tensors, in any order, into parameters, and these into a decoder's weights."""

    def __init__(
        self,
        decoder: Decoder,
        dtype: torch.dtype,
        device: torch.device,
        projections: Projections[P],
    ) -> None:
        self._decoder, self._dtype, self._device = decoder, dtype, device
        self._projections = projections
        self._forms = {
            name: (parameter, form)
            for parameter in parameters(decoder)
            for form in parameter.forms
            for name in form
        }
        self._reading: dict[str, _Reading] = {}
        self._made: dict[Role, dict[str, Any]] = {role: {} for role in Role}
        self._num_bytes = 0

    def __contains__(self, tensor_name: str) -> bool:
        return tensor_name in self._forms

    def reads_parts(self, tensor_name: str) -> bool:
        """Returns whether a tensor is read part by part: all of it may be gigabytes."""
        _, form = self._forms[tensor_name]
        return form[tensor_name].num_experts > 0

    def add(self, tensor_name: str, tensor: Stored) -> None:
        parameter, form = self._forms[tensor_name]
        reading = self._reading.get(parameter.key)
        if reading is None:
            reading = _Reading(self._empty(parameter), dict(form))
            self._reading[parameter.key] = reading
        piece = reading.left.pop(tensor_name)
        if piece.put is None:
            reading.made.copy_(tensor[:].view_as(reading.made))
        elif piece.num_experts:
            for expert in range(piece.num_experts):
                piece.put(reading.made, tensor[expert], expert)
        else:
            piece.put(reading.made, tensor[:], 0)
        if not reading.left:
            del self._reading[parameter.key]
            finished = self._finished(parameter, reading.made)
            self._made[parameter.role][parameter.key] = finished

    def _empty(self, parameter: Parameter) -> Any:
        """Allocates a parameter."""
        if parameter.role is Role.PROJECTION:
            return self._projections.empty(
                parameter.num_rows,
                parameter.in_size,
                has_bias=parameter.has_bias,
                dtype=self._dtype,
                device=self._device,
            )
        inner = (parameter.in_size,) if parameter.in_size else ()
        is_wide = parameter.role is Role.NUMBERS
        is_wide |= parameter.norm is not None and parameter.norm.is_wide
        dtype = torch.float32 if is_wide else self._dtype
        return torch.empty(parameter.num_rows, *inner, dtype=dtype, device=self._device)

    def _finished(self, parameter: Parameter, made: Any) -> object:
        """Returns a parameter as the weights have it, of which all has been read."""
        if parameter.role is Role.PROJECTION:
            self._num_bytes += made.num_bytes
            return made
        if parameter.role is Role.SCALAR:
            return float(made)
        self._num_bytes += made.nbytes
        norm = parameter.norm
        if norm is None:
            return made
        made += norm.weight_offset
        made *= norm.weight_scale
        return NormWeight(made, norm.eps, norm.kind is NormKind.LAYER, norm.weight_offset)

    def finish(self) -> ModelWeights[P]:
        """Returns the weights; every tensor must have been added."""
        assert not self._reading
        made = self._made
        if self._decoder.head.is_tied:
            head = self._projections.of(made[Role.TABLE][EMBEDDING_KEY])
            made[Role.PROJECTION][HEAD_KEY] = head
            if not isinstance(head, Linear):
                self._num_bytes += head.num_bytes
        norms = made[Role.NORM]
        for spec, layer in weights_of(self._decoder):
            if isinstance(spec, Norm) and not has_values(spec):
                norms[norm_key(spec, layer)] = ones(spec, self._dtype, self._device)
        return ModelWeights.of_roles(made, self._num_bytes)


def ones(norm: Norm, dtype: torch.dtype, device: torch.device) -> NormWeight:
    """Returns a norm that has no weight of its own."""
    weight = torch.ones(norm.size, dtype=torch.float32 if norm.is_wide else dtype, device=device)
    return NormWeight(weight, norm.eps, norm.kind is NormKind.LAYER)


@dataclass(frozen=True, slots=True)
class TextTensor:
    """A tensor of a file, as the file's header has it; `name` is its name in a model of text
    alone."""

    name: str
    stored_name: str
    path: Path
    shape: tuple[int, ...]
    dtype: str


def _tensors(model_dir: Path, wrapper: Wrapper) -> list[TextTensor]:
    from safetensors import SafetensorError, safe_open

    found: dict[str, TextTensor] = {}
    for path in weight_files(model_dir):
        try:
            with safe_open(path, framework="pt") as file:
                for stored in file.offset_keys():
                    name = wrapper.text_name(stored)
                    if name is None:
                        continue
                    if name in found:
                        twice = f"{found[name].stored_name} and {stored}"
                        raise UnsupportedModel(f"{name} is there twice, as {twice}")
                    header = file.get_slice(stored)
                    shape = tuple(header.get_shape())
                    found[name] = TextTensor(name, stored, path, shape, header.get_dtype())
        except (OSError, SafetensorError) as error:
            raise UnsupportedModel(f"{path} cannot be read: {error}") from error
    return list(found.values())


def _check(
    tensors: list[TextTensor], parameters: tuple[Parameter, ...], unused: tuple[str, ...]
) -> None:
    names = {tensor.name for tensor in tensors}
    forms = (each.form(names) for each in parameters)
    shapes = {name: piece.shape for form in forms for name, piece in form.items()}
    missing = sorted(shapes.keys() - names)
    others = (name for name in names - shapes.keys() if not name.startswith(unused))
    unexpected = sorted(name for name in others if not _is_ignored(name))
    for what, found in (("missing", missing), ("unexpected", unexpected)):
        if found:
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            raise UnsupportedModel(
                f"{what} tensors: {', '.join(found[:5])}{more}; is {CONFIG} of another model than "
                "the weights, or was a merged model saved under other names? Save both with "
                "save_pretrained"
            )
    for tensor in tensors:
        if tensor.name in shapes:
            _check_tensor(tensor, shapes[tensor.name])


def _check_tensor(tensor: TextTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise UnsupportedModel(
            f"{tensor.name} has shape {list(tensor.shape)}, but {list(shape)} by config.json"
        )
    if tensor.dtype not in _FLOAT_DTYPES:
        raise UnsupportedModel(
            f"{tensor.name} has dtype {tensor.dtype}, which is not supported, but "
            f"{', '.join(_FLOAT_DTYPES)}: dequantise the weights first"
        )


def _is_ignored(name: str) -> bool:
    """Returns whether old files hold it unused: rotary frequencies, or the head of a tied model."""
    return name == "lm_head.weight" or name.endswith(".rotary_emb.inv_freq")
