"""A and B as they were when training began, of initialisations that take their product out of the
base: PEFT trains on `W - scale * B0 @ A0`.

They are read from the adapter as it was saved before training, or computed from the base model
where nothing else decides them:

    pissa   scale * B0 @ A0 is W without all but its `rank` largest singular values
    olora   B0 @ A0 is W projected on the span of its first `rank` columns (Q R = W, of which Q's
            first columns are B0 and R's first rows A0), at any scale

Only the product counts, and both are projections `P @ W`: so neither needs a whole factorisation.
PEFT computes in float32; here it is float64, which is nearer to the exact result. Of a base in
bfloat16 it saves A0 and B0 rounded, and subtracts them before it rounds them, as is done here.

Sources: `pissa_init`, `olora_init` and `loftq_init` in peft/tuners/lora/layer.py of PEFT 0.21.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import torch

from adapter_store.checkpoint.conversion.base_weights import BaseModel
from adapter_store.checkpoint.open import Checkpoint, open_checkpoint
from adapter_store.checkpoint.peft.fields import changes_base
from adapter_store.checkpoint.reading.files import AnyFolder, CheckpointLimits, read_capped
from adapter_store.checkpoint.reading.json import parse_object, show
from adapter_store.checkpoint.tensors import TargetWeights
from adapter_store.errors import InvalidAdapter
from contract.adapter_files import CONFIG_FILE
from contract.images.targets import TargetKind
from servicekit.errors import FailedPrecondition

PISSA, OLORA, LOFTQ = "pissa", "olora", "loftq"
COMPUTED = frozenset({PISSA, OLORA})
"""Initialisations that follow from the base's weights alone."""

_PLAIN = (torch.float32, torch.float16, torch.bfloat16)
_CHUNK_BYTES = 16 << 20
_SMALLEST_GAP = 1e-6
"""Singular values that differ by less, as a part of the largest, are one in float32, and so for
PEFT."""


class Factors(NamedTuple):
    """B @ A as float64: `a` [rank, in], `b` [out, rank]."""

    a: torch.Tensor
    b: torch.Tensor


class InitialWeights(Protocol):
    def read(self, target: TargetWeights) -> Factors:
        """Returns A0 and B0 such that a target's base weight is `scale * b @ a` less than the base
        model's, or would be if nothing were rounded and quantised. Raises ServiceError."""


class SavedWeights:
    """The adapter in a folder, as it was saved before training. LoftQ's are its rest of the error
    of quantisation, at any scale of the adapter: `is_scaled` False."""

    def __init__(self, folder: AnyFolder, limits: CheckpointLimits, *, is_scaled: bool) -> None:
        """Raises InvalidAdapter and LimitExceeded as `open_checkpoint`, and InvalidAdapter for an
        adapter that may have been trained since."""
        data = read_capped(folder, CONFIG_FILE, limits.max_config_bytes)
        init = parse_object(data, CONFIG_FILE).get("init_lora_weights", True)
        if changes_base(init):
            raise InvalidAdapter(
                f"{CONFIG_FILE}: init_lora_weights={show(init)}: it may be a checkpoint that was "
                "trained. If this is the adapter as it was before training, set it to true, as "
                "PEFT asks for",
                subject="init_lora_weights",
                reason="CONFIG_UNSUPPORTED",
            )
        self._checkpoint: Checkpoint = open_checkpoint(folder, limits)
        self._is_scaled = is_scaled

    def check(self, targets: Mapping[str, TargetWeights]) -> None:
        """Raises InvalidAdapter unless it has the same modules, in the same shapes
        and at the same scales, and nothing of an embedding, of which PEFT takes nothing out."""
        initial = self._checkpoint.targets
        if targets.keys() != initial.keys():
            name = min(targets.keys() ^ initial.keys())
            who = "the initial" if name in targets else "the trained"
            raise _mismatch(name, f"{who} adapter has no A and B for it, and the other one has")
        for name, target in targets.items():
            other = initial[name]
            of_trained = (target.kind, target.a.shape, target.b.shape)
            of_initial = (other.kind, other.a.shape, other.b.shape)
            if of_trained != of_initial:
                raise _mismatch(
                    name,
                    f"A and B are {list(other.a.shape)} and {list(other.b.shape)} in the initial "
                    f"adapter, {list(target.a.shape)} and {list(target.b.shape)} in the trained",
                )
            if other.scale != target.scale:
                raise _mismatch(
                    name,
                    f"the scale is {other.scale:g} by the initial adapter's config, "
                    f"{target.scale:g} by the trained one's",
                )
            if target.kind is TargetKind.EMBEDDING and self._changes(other):
                raise _mismatch(
                    name,
                    "the initial adapter changes the embedding, which no adapter does "
                    "before training",
                )

    def _changes(self, target: TargetWeights) -> bool:
        return all(bool(self._checkpoint.read_tensor(each).any()) for each in (target.a, target.b))

    def read(self, target: TargetWeights) -> Factors:
        initial = self._checkpoint.targets[target.name]
        a, b = map(self._checkpoint.read_tensor, (initial.a, initial.b))
        scale = 1.0 if self._is_scaled else target.scale
        return Factors(a.double(), b.double() / scale)


class ComputedWeights:
    """The start of PiSSA or OLoRA, computed from the base model, one weight at a time."""

    def __init__(self, method: str, model: BaseModel, *, fan_in_fan_out: bool) -> None:
        self._method, self._model = method, model
        self._fan_in_fan_out = fan_in_fan_out

    def read(self, target: TargetWeights) -> Factors:
        """Returns A and B of the start, fp64. Raises FailedPrecondition if the weight does not
        determine them, and as `_weight`."""
        weight = self._weight(target)
        # A projection of the smaller side: of its size is all that is held besides the weight.
        is_turned = self._method == PISSA and weight.shape[0] > weight.shape[1]
        matrix = weight.T if is_turned else weight
        find = largest_directions if self._method == PISSA else first_directions
        try:
            directions = find(matrix, target.rank)
        except ValueError as error:
            raise FailedPrecondition(
                f"{target.name}.weight of {self._model.folder}: {error}, so it does not "
                f"determine the start of {self._method}: give --initial DIR, the adapter as it "
                "was saved before training",
                subject=target.name,
            ) from error
        rest = torch.cat([directions.T @ chunk for chunk in _columns(matrix)], 1)
        factors = Factors(directions.T, rest.T) if is_turned else Factors(rest, directions)
        if self._method == OLORA:
            return factors
        return Factors(factors.a / target.scale, factors.b)

    def _weight(self, target: TargetWeights) -> torch.Tensor:
        """Returns the weight [out, in] in its own type. Raises InvalidArgument if there is none,
        FailedPrecondition if the adapter cannot have been trained on it."""
        name = f"{target.name}.weight"
        weight = self._model.read(name)
        where = f"{name} of {self._model.folder}"
        if weight.dtype not in _PLAIN:
            raise FailedPrecondition(
                f"{where} is {weight.dtype}: {self._method} begins with weights in float32, "
                "float16 or bfloat16; give the model in one of them",
                subject=name,
            )
        weight = weight.T if self._fan_in_fan_out else weight
        wanted = [target.out_features, target.in_features]
        if list(weight.shape) != wanted:
            raise FailedPrecondition(
                f"{where} is {list(weight.shape)}, and the adapter's A and B are for {wanted}: is "
                "it the model that the adapter was trained on?",
                subject=name,
            )
        if not torch.isfinite(weight).all():
            raise FailedPrecondition(f"{where} contains NaN or infinite values", subject=name)
        return weight


def largest_directions(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    """Returns the left singular vectors of the `rank` largest singular values of a matrix
    [rows, columns], as [rows, rank] in float64.

    From the eigenvectors of `matrix @ matrix.T`, which is rows x rows: in float64 they are more
    exact than a float32 singular value decomposition, in half of its time. Raises ValueError if
    the smallest of these values equals the next one.
    """
    rows = matrix.shape[0]
    square = torch.zeros(rows, rows, dtype=torch.float64)
    for chunk in _columns(matrix):
        square.addmm_(chunk, chunk.T)
    squares, vectors = torch.linalg.eigh(square)  # ascending
    values = squares.clamp(min=0).sqrt()
    if rank < rows:
        last, following = float(values[-rank]), float(values[-rank - 1])
        threshold = _SMALLEST_GAP * float(values[-1])
        if last - following <= threshold < last:
            raise ValueError(f"its singular values {rank} and {rank + 1} are equal")
    return vectors[:, -rank:]


def first_directions(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    """Returns an orthonormal basis of the span of the first `rank` columns of a matrix [rows,
    columns], as [rows, rank] in float64. Raises ValueError if they depend on one another."""
    basis, triangle = torch.linalg.qr(matrix[:, :rank].double())
    sizes = triangle.diagonal().abs()
    if sizes.min() <= _SMALLEST_GAP * sizes.max():
        raise ValueError(f"its first {rank} columns depend on one another")
    return basis


def _columns(matrix: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields some columns after the other, in float64."""
    step = max(1, _CHUNK_BYTES // (8 * matrix.shape[0]))
    for start in range(0, matrix.shape[1], step):
        yield matrix[:, start : start + step].double()


def _mismatch(name: str, detail: str) -> InvalidAdapter:
    return InvalidAdapter(f"{name}: {detail}", subject=name)
