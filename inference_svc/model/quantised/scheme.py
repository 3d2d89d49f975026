"""The parts of a quantised checkpoint's description, in which all formats are told alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from kernels.quantised import QuantisedRows, WeightFormat

Rows: TypeAlias = QuantisedRows | Tensor
"""Rows of a weight [N, in]; plain ones are of any float dtype."""


class TensorSpec(NamedTuple):
    """The shape of a tensor, and the dtypes that it may have, by their names in safetensors. A file
    may lack it if it `is_optional`. A dimension of -n is of 1 to n: only the file knows it."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    is_optional: bool = False

    def fits(self, shape: Sequence[int]) -> bool:
        """Returns whether a tensor of a file has such a shape. Some writers have [] for [1]."""
        shape = shape or (1,)
        return len(shape) == len(self.shape) and all(
            size == want or 1 <= size <= -want for size, want in zip(shape, self.shape, strict=True)
        )

    @property
    def sizes(self) -> str:
        """The shape for messages, such as "[3, up to 4]"."""
        sizes = (str(each) if each >= 0 else f"up to {-each}" for each in self.shape)
        return f"[{', '.join(sizes)}]"


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A weight [out, in], or of experts [experts, out, in], that a checkpoint has in few bits.

    `tensors` are by the ends of their names: a module's path, a dot, and "weight_packed". An end
    that begins with "_" follows the path without a dot. `decode` makes rows of them, of `format`,
    or plain rows if that is None: this checkpoint's form is not computed with as it is. It raises
    UnsupportedModel for contents that cannot be meant, naming the tensor's end. Of experts it gets
    one expert's tensors at a time. If it `is_by_rows`, it may get the same rows of each tensor, and
    makes these rows of the weight. A file has at least one of the tensors `one_of`, if there are
    any, which are all optional.
    """

    format: WeightFormat | None
    tensors: Mapping[str, TensorSpec]
    decode: Callable[[Mapping[str, Tensor]], Rows]
    is_by_rows: bool = False
    one_of: tuple[str, ...] = ()


class Scheme(Protocol):
    """The quantisation of a checkpoint, as its config says it; can be pickled."""

    @property
    def name(self) -> str:
        """Its published name with the facts that matter, such as "gptq, 4 bits, groups of 128"."""

    @property
    def form(self) -> str:
        """The form of most weights in a word or two, such as "int4": see `weight_form`."""

    def matrix(
        self, module: str, out_features: int, in_features: int, num_experts: int = 0
    ) -> StoredMatrix | None:
        """Returns the form of a module's weight, of experts that lie in one tensor if there are
        `num_experts`. None: the checkpoint has it plain, or not in this form.

        Raises UnsupportedModel where the sizes do not fit the scheme.
        """
