"""The operations that towers alone have, in native programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_svc.backends.native.adapter_ops import GroupedOp
from inference_svc.backends.native.encoder import Tensors, activate_op, rotate_heads_op
from inference_svc.backends.native.projections import PackedProjection
from inference_svc.backends.native.towers.memory import PartArrays, tower_shapes
from inference_svc.model.checkpoint.weights import ModelWeights
from inference_svc.model.description import Pictures
from inference_svc.model.encoder.clips import Clip, Join
from inference_svc.model.encoder.operations import (
    Activate,
    AddInputs,
    AttendBothWays,
    RotateHeads,
)
from inference_svc.model.encoder.towers import (
    EmbedPatches,
    MergePatches,
    ReadPatches,
    Standardise,
)
from inference_svc.model.operations import Op, Rows
from inference_svc.model.tower import byte_values
from kernels.attention.native_both_ways import (
    BothWaysArgs,
    BothWaysScratch,
    both_ways_op,
)
from kernels.elementwise import add_rows_op, gather_op
from kernels.host_memory import allocate_host
from kernels.linear import PackedLinear, linear_op
from kernels.native.library import NativeOp
from kernels.pictures.native import (
    CutPatchesArgs,
    add_blend_op,
    clip_op,
    copy_rows_op,
    cut_patches_op,
    load_rows_op,
    merge_patches_op,
    read_patches_op,
    standardise_op,
)


class _Embedded(NamedTuple):
    """The arguments of the product that makes tokens of patches, fp32 [P, pixels], and the
    tokens."""

    product: Any
    patches: Tensor
    out: Tensor


class Attending(NamedTuple):
    """The attention of a layer that sees all of a tile, a program of its own, with its arguments;
    and the copy of its outputs, which have taken the place of the queries."""

    op: NativeOp
    args: BothWaysArgs
    outputs: NativeOp


class TowerOps:
    """Makes operations over the arrays of a `part`. What changes from tile to tile, the addresses
    of pixels and of a layer's queries, keys and values, is said before each run. Windows attend
    among the other operations of a unit, which `attending` precede."""

    def __init__(
        self,
        pictures: Pictures,
        weights: ModelWeights[PackedProjection],
        part: PartArrays,
    ) -> None:
        self._values = byte_values(pictures.processor)
        self._weights, self.part = weights, part
        self._scratches = {
            shape.head_dim: BothWaysScratch(shape)
            for shape in tower_shapes(pictures.tower, weights.dtype, len(part.positions))
        }
        self._cut: CutPatchesArgs | None = None
        self._embedded: _Embedded | None = None
        self.windows: list[BothWaysArgs] = []
        self.attending: list[Attending] = []

    @property
    def num_bytes(self) -> int:
        """The memory of patches, and of attention."""
        of_patches = 0 if self._embedded is None else self._embedded.patches.nbytes
        return of_patches + sum(each.num_bytes for each in self._scratches.values())

    def read_pixels(self, pixels: NDArray[np.uint8]) -> None:
        """Says which tile the part is of, uint8 [height, width, 3], which must stay until the
        program has run. The part is described."""
        assert self._cut is not None, "the operations are made"
        self._cut.pixels, self._cut.width = pixels.ctypes.data, pixels.shape[1]
        if self._embedded is not None:
            product, _, out = self._embedded
            row = int(self.part.num_added)
            product.out = out.data_ptr() + row * out.stride(0) * out.element_size()

    def embed_patches(self, op: EmbedPatches, at: Tensors) -> Iterator[GroupedOp]:
        part, out, side = self.part, at[op.out], op.patches.form.patch_size
        kernel = op.kernel(self._weights.numbers[op.weight.name])
        packed = PackedLinear.pack(kernel, self._weights.numbers_of(op.bias))
        num_bytes = len(part.positions) * kernel.shape[1] * torch.float32.itemsize
        patches = allocate_host(num_bytes).view(torch.float32).view(-1, kernel.shape[1])
        places = part.patch_rows, part.patch_columns
        cut = cut_patches_op(self._values, *places, patches, part.num_patches, side=side)
        product = linear_op(patches, packed, out, part.num_patches)
        assert isinstance(cut.args, CutPatchesArgs)
        self._cut, self._embedded = cut.args, _Embedded(product.args, patches, out)
        yield "", cut
        yield "", product
        token = self._weights.numbers_of(op.class_token)
        if token is not None:
            table = token.to(out.dtype)[None]
            yield "", gather_op(table, out, torch.zeros(1, dtype=torch.int64), part.num_added)

    def read_patches(self, op: ReadPatches, at: Tensors) -> Iterator[GroupedOp]:
        part, side = self.part, op.patches.form.patch_size
        places = part.patch_rows, part.patch_columns
        cut = read_patches_op(self._values, *places, at[op.out], part.num_patches, side=side)
        assert isinstance(cut.args, CutPatchesArgs)
        self._cut = cut.args
        yield "", cut

    def add_inputs(self, op: AddInputs, at: Tensors) -> Iterator[GroupedOp]:
        part, out = self.part, at[op.out]
        assert op.positions is not None, "a tower's patches have no types"
        table, count = self._weights.tables[op.positions.key], part.count(op.out.rows)
        if op.are_blended:
            yield "", add_blend_op(out, table, *part.blend, count)
        else:
            positions = part.positions
            yield "", add_rows_op(out, None, None, table, positions, count, first_row=op.first_row)

    def rotate(self, op: RotateHeads, at: Tensors) -> Iterator[GroupedOp]:
        yield "", rotate_heads_op(op, at, self.part.count(op.out.rows))

    def attend(self, op: AttendBothWays, at: Tensors) -> Iterator[GroupedOp]:
        mixer, part = op.mixer, self.part
        rows = part.windows if mixer.in_windows else part.tile
        scratch = self._scratches[mixer.head_dim]
        qkv, out = at[op.inputs[0]], at[op.out]
        made = both_ways_op(qkv, out, *rows, scratch, scale=mixer.scale)
        assert isinstance(made.args, BothWaysArgs)
        if mixer.in_windows:
            self.windows.append(made.args)
            yield "", made
            return
        made.args.out_stride = qkv.stride(0)
        found = load_rows_op(out, part.count(op.out.rows), stride=qkv.stride(0))
        self.attending.append(Attending(made, made.args, found))
        yield "", found

    def activate(self, op: Activate, at: Tensors) -> Iterator[GroupedOp]:
        yield "", activate_op(op, at, self.part.count(op.out.rows))

    def clip(self, op: Clip, at: Tensors) -> Iterator[GroupedOp]:
        least, most = (float(self._weights.numbers[each.name]) for each in (op.least, op.most))
        x, out, count = at[op.inputs[0]], at[op.out], self.part.count(op.out.rows)
        yield "", clip_op(x, out, count, least=least, most=most)

    def join(self, op: Join, at: Tensors) -> Iterator[GroupedOp]:
        parts = [at[each] for each in op.inputs]
        columns = at[op.out].split([each.shape[1] for each in parts], dim=1)
        for part, own in zip(parts, columns, strict=True):
            yield "", copy_rows_op(part, own, self.part.count(op.out.rows))

    def standardise(self, op: Standardise, at: Tensors) -> Iterator[GroupedOp]:
        bias, factor = (self._weights.numbers_of(each) for each in (op.bias, op.factor))
        x, count = at[op.out], self.part.count(op.out.rows)
        scale = op.standard.scale
        yield "", standardise_op(x, count, scale=scale, bias=bias, factor=factor)

    def merge_patches(self, op: MergePatches, at: Tensors) -> Iterator[GroupedOp]:
        x, out, count = at[op.inputs[0]], at[op.out], self.part.count(Rows.CELLS)
        yield "", merge_patches_op(x, out, count, patches=op.count, merging=op.merging)


MAKE_TOWERS: Mapping[type[Op], Callable[[TowerOps, Any, Tensors], Iterator[GroupedOp]]] = {
    Clip: TowerOps.clip,
    EmbedPatches: TowerOps.embed_patches,
    Join: TowerOps.join,
    MergePatches: TowerOps.merge_patches,
    ReadPatches: TowerOps.read_patches,
    Standardise: TowerOps.standardise,
}
"""The function that makes each kind of operation that towers alone have."""
