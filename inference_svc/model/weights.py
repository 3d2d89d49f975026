"""Reads a model directory's safetensors into the decoder's buffers, in one pass.

Each tensor is read once, in the order of its file, and goes to its place at once: into the form
that a backend computes with, of a projection too. There is no second copy of anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from inference_svc.errors import UnsupportedModel
from inference_svc.model.description import (
    Attention,
    Block,
    Decoder,
    Dense,
    Experts,
    ExpertsProjection,
    Norm,
    NormKind,
    Projection,
    Wrapper,
    layer_path,
)
from inference_svc.model.files import CONFIG, weight_files
from inference_svc.model.layers import Linear
from inference_svc.model.parameters import Parameter, Piece, Role, parameters, unused
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
class DenseWeights(Generic[P]):
    """The weights of a `Dense` half."""

    gate_up: P
    down: P


@dataclass(frozen=True, slots=True)
class RouterWeights(Generic[P]):
    """The weights of a `Router`; `bias` and `expert_scales` are fp32 [experts]."""

    projection: P
    norm: NormWeight | None
    bias: Tensor | None
    expert_scales: Tensor | None


@dataclass(frozen=True, slots=True)
class ExpertsWeights(Generic[P]):
    """The weights of `Experts`. All experts' lie below each other in one projection, each on
    `padded_rows`."""

    router: RouterWeights[P]
    gate_up: P
    down: P
    shared: DenseWeights[P] | None
    shared_gate: P | None
    norm: NormWeight | None
    post_norm: NormWeight | None
    shared_post_norm: NormWeight | None


@dataclass(frozen=True, slots=True)
class LayerInputWeights(Generic[P]):
    """The weights of a `LayerInput`."""

    gate: P
    out: P


@dataclass(frozen=True, slots=True)
class LayerInputsWeights(Generic[P]):
    """The weights of `LayerInputs`; `embedding` is [vocab_size, of all layers]."""

    embedding: Tensor
    projection: P
    norm: NormWeight


@dataclass(frozen=True, slots=True)
class BlockWeights(Generic[P]):
    """The weights of a `Block`, by its names; None for absent ones."""

    attention_norm: NormWeight | None
    qkv: P
    q_norm: NormWeight | None
    k_norm: NormWeight | None
    v_norm: NormWeight | None
    sinks: Tensor | None
    """fp32 [heads]"""
    o: P
    attention_post_norm: NormWeight | None
    feed_forward_norm: NormWeight | None
    feed_forward: DenseWeights[P] | ExpertsWeights[P]
    feed_forward_post_norm: NormWeight | None
    layer_input: LayerInputWeights[P] | None
    layer_input_post_norm: NormWeight | None
    scalar: float

    @classmethod
    def build(cls, block: Block, make: Make[P], scalar: float = 1.0) -> BlockWeights[P]:
        """Makes a block's weights one by one."""
        attention, layer_input, half = block.attention, block.layer_input, block.feed_forward
        return cls(
            attention_norm=make.norm(block.attention_norm),
            qkv=make.projection(attention.qkv),
            q_norm=make.norm(attention.q_norm),
            k_norm=make.norm(attention.k_norm),
            v_norm=make.norm(attention.v_norm),
            sinks=make.numbers(attention.sinks, attention.num_heads),
            o=make.projection(attention.out),
            attention_post_norm=make.norm(block.attention_post_norm),
            feed_forward_norm=make.norm(block.feed_forward_norm),
            feed_forward=_dense(half, make) if isinstance(half, Dense) else _experts(half, make),
            feed_forward_post_norm=make.norm(block.feed_forward_post_norm),
            layer_input=None
            if layer_input is None
            else LayerInputWeights(
                make.projection(layer_input.gate), make.projection(layer_input.out)
            ),
            layer_input_post_norm=make.norm(block.layer_input_post_norm),
            scalar=scalar,
        )

    @property
    def experts(self) -> ExpertsWeights[P] | None:
        """The weights of the mixture that the feed-forward half is, if it is one."""
        return self.feed_forward if isinstance(self.feed_forward, ExpertsWeights) else None

    @property
    def dense(self) -> DenseWeights[P] | None:
        """The weights of the half that every token passes through; see `Block.dense`."""
        half = self.feed_forward
        return half if isinstance(half, DenseWeights) else half.shared

    @property
    def projections(self) -> Iterator[P]:
        """In the order of `Block.projections`."""
        yield from (self.qkv, self.o)
        if self.dense is not None:
            yield from (self.dense.gate_up, self.dense.down)
        if self.experts is not None:
            if self.experts.shared_gate is not None:
                yield self.experts.shared_gate
            yield from (self.experts.router.projection, self.experts.gate_up, self.experts.down)
        if self.layer_input is not None:
            yield from (self.layer_input.gate, self.layer_input.out)

    def head_norms(self, attention: Attention) -> HeadNorms:
        """Returns the norms of its attention, which this is."""
        found = (self.q_norm, self.k_norm, self.v_norm)
        [eps] = {norm.eps for norm in found if norm is not None} or {0.0}
        q, k, v = (None if norm is None else norm.weight for norm in found)
        return HeadNorms(q, k, v, eps, attention.norms_rotated)


class Make(Generic[P]):
    """Makes the parts of a block's weights: `make_numbers` makes fp32 [size], by name and size."""

    def __init__(
        self,
        make_projection: Callable[[Projection | ExpertsProjection], P],
        make_norm: Callable[[Norm], NormWeight],
        make_numbers: Callable[[str, int], Tensor],
    ) -> None:
        self.projection = make_projection
        self._make_norm = make_norm
        self._make_numbers = make_numbers

    def norm(self, norm: Norm | None) -> NormWeight | None:
        return None if norm is None else self._make_norm(norm)

    def numbers(self, name: str, size: int) -> Tensor | None:
        """Returns fp32 [size]; None without a name."""
        return self._make_numbers(name, size) if name else None


def _dense(half: Dense, make: Make[P]) -> DenseWeights[P]:
    return DenseWeights(make.projection(half.gate_up), make.projection(half.down))


def _experts(half: Experts, make: Make[P]) -> ExpertsWeights[P]:
    router, count = half.router, half.num_experts
    return ExpertsWeights(
        RouterWeights(
            make.projection(router.projection),
            make.norm(router.norm),
            make.numbers(router.bias, count),
            make.numbers(router.expert_scales, count),
        ),
        make.projection(half.gate_up),
        make.projection(half.down),
        shared=None if half.shared is None else _dense(half.shared, make),
        shared_gate=None if half.shared_gate is None else make.projection(half.shared_gate),
        norm=make.norm(half.norm),
        post_norm=make.norm(half.post_norm),
        shared_post_norm=make.norm(half.shared_post_norm),
    )


@dataclass(frozen=True, slots=True)
class ModelWeights(Generic[P]):
    """All weights of a decoder; `embedding` is [vocab_size, hidden_size]. `num_bytes` counts bytes
    in memory: a tied head that shares the embedding's tensor is counted once."""

    embedding: Tensor
    blocks: tuple[BlockWeights[P], ...]
    norm: NormWeight
    head: P
    num_bytes: int
    layer_inputs: LayerInputsWeights[P] | None = None


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
        self._made: dict[str, Any] = {}
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
            reading.made.copy_(tensor[:])
        elif piece.num_experts:
            for expert in range(piece.num_experts):
                piece.put(reading.made, tensor[expert], expert)
        else:
            piece.put(reading.made, tensor[:], 0)
        if not reading.left:
            del self._reading[parameter.key]
            self._made[parameter.key] = self._finished(parameter, reading.made)

    def _empty(self, parameter: Parameter) -> Any:
        """Allocates a parameter."""
        if parameter.role is Role.PROJECTION:
            return self._projections.empty(
                *(parameter.num_rows, parameter.in_size),
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
            made["head"] = head = self._projections.of(made["embedding"])
            if not isinstance(head, Linear):
                self._num_bytes += head.num_bytes
        blocks = tuple(self._block(index) for index in range(self._decoder.num_layers))
        return ModelWeights(
            *(made["embedding"], blocks, made["norm"], made["head"], self._num_bytes),
            layer_inputs=self._layer_inputs(),
        )

    def _layer_inputs(self) -> LayerInputsWeights[P] | None:
        if self._decoder.layer_inputs is None:
            return None
        projection = self._made[self._decoder.layer_inputs.projection.name]
        norm = self._made["layer_inputs_norm"]
        return LayerInputsWeights(self._made["layer_embedding"], projection, norm)

    def _block(self, index: int) -> BlockWeights[P]:
        def norm(norm: Norm) -> NormWeight:
            if not norm.module:
                return ones(norm, self._dtype, self._device)
            found: NormWeight = self._made[layer_path(index, norm.module)]
            return found

        make = Make[P](
            lambda projection: self._made[f"layers.{index}.{projection.name}"],
            norm,
            lambda name, _: self._made[layer_path(index, name)],
        )
        scalar = self._made.get(f"layers.{index}.scalar", 1.0)
        return BlockWeights.build(self._decoder.blocks[index], make, scalar)


def ones(norm: Norm, dtype: torch.dtype, device: torch.device) -> NormWeight:
    """Returns a norm that has no weight of its own."""
    weight = torch.ones(norm.size, dtype=torch.float32 if norm.is_wide else dtype, device=device)
    return NormWeight(weight, norm.eps)


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
