"""Makes a plain LoRA of an adapter that was trained on a changed base: PiSSA's, OLoRA's, CorDA's,
LoRA-GA's or LoftQ's.

Training began with A0 and B0, and PEFT took their product out of the base. The model is trained as
`W - s B0 A0 + s B A`, s the scale alpha / r. On the base itself that is a change of
`s (B A - B0 A0)`, of up to twice the rank. PEFT's own conversion saves it as [B, -B0] and [A; A0],
two products that are nearly equal: rounded to bfloat16, as servers compute, their difference is
wrong by a tenth and more. Here it is the same product in factors of its own, found through their QR
and singular value decompositions, so that the difference itself is rounded.

The base of LoftQ is quantised, and W is `Q + B0 A0`, whatever s is, except for the rest that rank r
leaves of the error of quantisation. The change of W is taken to be `s B A - B0 A0`: exact but for
that rest, which is of full rank and in no adapter.

One module is held at a time. Source: `subtract_mutated_init` in peft/tuners/lora/model.py and
`save_pretrained` in peft/peft_model.py of PEFT 0.21, which leaves out all but A and B of linear
layers, and refuses rank-stabilised scales with patterns.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from adapter_store.checkpoint.conversion.base_weights import BaseModel, SavedTensor
from adapter_store.checkpoint.conversion.initial_weights import (
    COMPUTED,
    LOFTQ,
    OLORA,
    PISSA,
    ComputedWeights,
    Factors,
    InitialWeights,
    SavedWeights,
)
from adapter_store.checkpoint.formats.select import Format, find_format
from adapter_store.checkpoint.open import TORCH_DTYPES, Checkpoint, open_checkpoint
from adapter_store.checkpoint.peft.config import (
    DEFAULT_ALPHA,
    DEFAULT_RANK,
    AdapterConfig,
    parse_config,
)
from adapter_store.checkpoint.peft.fields import changes_base
from adapter_store.checkpoint.peft.module_patterns import OUTPUT_LAYER
from adapter_store.checkpoint.peft.tensor_keys import PREFIX
from adapter_store.checkpoint.reading.files import (
    AnyFolder,
    CheckpointLimits,
    changed_copy,
    check_folders,
    open_file,
    read_capped,
)
from adapter_store.checkpoint.reading.json import parse_object, show
from adapter_store.checkpoint.reading.safetensors import encode_header
from adapter_store.checkpoint.tensors import TargetWeights
from adapter_store.errors import InvalidAdapter
from contract.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from contract.folders import GivenFolder, shown
from contract.images.dtypes import DataType
from contract.images.targets import TargetKind
from servicekit.errors import FailedPrecondition

LIMITS = CheckpointLimits(allowed_config_keys=None)
"""Only the store, which will read the result, knows its operator's allow-list."""

UNNAMED = "true"
"""The initialisation of a trained adapter whose config was set to true before training, so that the
initial adapter could be saved, as PEFT's documentation does."""

_RANDOM = "a randomised decomposition, whose result differs each time"
_NOT_COMPUTED = {
    "pissa_niter": _RANDOM,
    "corda": "the effect of its data on the inputs of each layer",
    "lora_ga": "gradients of its data",
    LOFTQ: "the errors of quantising the base",
}
"""The facts in initialisations that do not follow from the base."""

_METHOD_CONFIGS: Mapping[str, Any] = {
    "loftq_config": {},
    "corda_config": None,
    "lora_ga_config": None,
}
"""The values in PEFT's own config for these where they are not used."""

_INITIAL = "--initial DIR, the adapter as it was saved before training"
_INSTEAD = "merge the adapter into the base that it was trained on, and serve that"
_NEGLIGIBLE = 1e-12
_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called with how many modules are done, of how many, and the name of the next."""

_Output: TypeAlias = tuple[str, DataType, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Conversion:
    """The result of a conversion. `rank`, the highest, and `num_bytes`, of A and B, are before and
    after. `change` is the change by training as a part of the start, by Frobenius norms of the
    products. `kept` are embeddings, of which nothing had been taken out, and `left_out` base
    weights that were saved along."""

    initialisation: str
    base_model: str
    num_modules: int
    rank: tuple[int, int]
    num_bytes: tuple[int, int]
    change: float
    kept: tuple[str, ...]
    left_out: tuple[str, ...]


def convert(
    source: Path,
    target: Path,
    model: Path | None = None,
    initial: Path | None = None,
    *,
    force: bool = False,
    progress: Progress = lambda *_: None,
) -> Conversion:
    """Writes the adapter in folder `source` to the new folder `target`, as a plain LoRA of the base
    model. The start of training is read from `initial`, the adapter as it was saved before, or
    computed from `model`, a folder as transformers saves one.

    Raises InvalidArgument if `target` exists, a folder is none or `model` has not the weights;
    InvalidAdapter for files that are no adapter's, or none that can be converted;
    FailedPrecondition if more must be given, if there is no room, or if the adapter cannot have
    begun with the given start, unless `force`.
    """
    for each in (source, initial or source):
        check_folders(each, target)
    with ExitStack() as stack:
        folder = stack.enter_context(GivenFolder(source))
        checkpoint, fields = _read_adapter(folder)
        method = _initialisation(fields, has_initial=initial is not None)
        base = None if model is None else BaseModel(model)
        linear = _linear_targets(checkpoint, method)
        _check_head(linear, base)
        left_out = _check_copies(checkpoint, linear, base)
        weights: InitialWeights
        if initial is not None:
            saved = stack.enter_context(GivenFolder(initial))
            weights = _read_initial(saved, checkpoint, is_scaled=method != LOFTQ)
        else:
            weights = _computed(method, base, checkpoint)
        writer = _Writer(checkpoint, weights, force or not method.startswith((PISSA, OLORA)))
        made = stack.enter_context(changed_copy(folder, target))
        writer.write(made, progress)
        kept = [each for each in checkpoint.targets.values() if each.name not in linear]
        config = json.dumps(_converted_config(fields, kept), indent=2)
        (made / CONFIG_FILE).write_text(f"{config}\n")
        rank = max(each.rank for each in linear.values())
        converted = open_checkpoint(made, LIMITS)  # as a store reads it
        return Conversion(
            method,
            checkpoint.base_model,
            len(linear),
            (rank, 2 * rank),
            (_num_bytes(checkpoint), _num_bytes(converted)),
            writer.change(),
            tuple(each.name for each in kept),
            left_out,
        )


def _read_adapter(folder: AnyFolder) -> tuple[Checkpoint, Mapping[str, Any]]:
    """Reads the adapter as if its base were not changed; returns it and its config's fields."""
    if find_format(folder) is Format.MLX:
        raise InvalidAdapter(
            "an adapter of MLX-LM is a plain LoRA already: register it as it is",
            subject=CONFIG_FILE,
        )
    data = read_capped(folder, CONFIG_FILE, LIMITS.max_config_bytes)
    fields = parse_object(data, CONFIG_FILE)
    plain = fields
    if changes_base(fields.get("init_lora_weights")):
        plain = {**fields, "init_lora_weights": True}
    config = parse_config(plain, LIMITS)
    _check_config(config)
    return open_checkpoint(folder, LIMITS, config=config), fields


def _check_config(config: AdapterConfig) -> None:
    """Raises InvalidAdapter CONFIG_UNSUPPORTED for contents besides A and B."""
    extras = config.extras
    present = {
        "use_dora": extras.use_dora,
        "lora_bias": extras.lora_bias,
        "bias": extras.bias != "none" and extras.bias,
        "modules_to_save": list(extras.modules_to_save),
        "trainable_token_indices": dict(extras.token_ids),
        "ensure_weight_tying": extras.ties_embeddings,
        "target_parameters": list(extras.parameters),
        "alora_invocation_tokens": list(extras.invocation_tokens),
    }
    for key, value in present.items():
        if value:
            raise _unsupported(key, value, f"only A and B of modules are converted; {_INSTEAD}")


def _initialisation(fields: Mapping[str, Any], *, has_initial: bool) -> str:
    """Returns the start of training, as init_lora_weights names it, in lower case. Raises
    InvalidAdapter if the base was not changed, FailedPrecondition if more has to be known."""
    value = fields.get("init_lora_weights", True)
    if not changes_base(value) and (value is not True or not has_initial):
        raise _unchanged(value)
    name = value.lower() if isinstance(value, str) else UNNAMED
    if name == UNNAMED and fields.get("loftq_config"):
        name = LOFTQ
    if name == OLORA and fields.get("fan_in_fan_out"):
        why = "the product that PEFT's OLoRA takes out of such layers is not its own B A"
        raise _unsupported("fan_in_fan_out", True, f"{why}; {_INSTEAD}")
    if not has_initial and name not in COMPUTED:
        began = (what for each, what in _NOT_COMPUTED.items() if name.startswith(each))
        raise FailedPrecondition(
            f"init_lora_weights={show(value)} begins with "
            f"{next(began, 'facts that are not known here')}: give {_INITIAL}; without it, "
            f"{_INSTEAD}",
            subject="init_lora_weights",
        )
    return name


def _unchanged(value: Any) -> InvalidAdapter:
    """Returns the error for an initialisation that changes nothing."""
    hint = ""
    if value is True:
        hint = f"; if it was set to true after get_peft_model, as PEFT asks for, give {_INITIAL}"
    return InvalidAdapter(
        f"{CONFIG_FILE}: init_lora_weights={show(value)} leaves the base as it is, so this is a "
        f"plain LoRA: register it as it is{hint}",
        subject="init_lora_weights",
    )


def _linear_targets(checkpoint: Checkpoint, method: str) -> dict[str, TargetWeights]:
    """Returns the linear layers, by name: of embeddings PEFT takes nothing out. Raises
    InvalidAdapter."""
    for experts in checkpoint.experts:
        raise InvalidAdapter(
            f"{experts.name}: A or B of all experts in one tensor, of which PEFT has no "
            f"init_lora_weights={method}; {_INSTEAD}",
            subject=experts.name,
        )
    targets = checkpoint.targets.values()
    linear = {each.name: each for each in targets if each.kind is TargetKind.LINEAR}
    if not linear:
        raise InvalidAdapter(
            "the adapter has only embeddings, which PEFT does not change: it is a plain LoRA",
            subject=next(iter(checkpoint.targets), CONFIG_FILE),
        )
    for target in linear.values():
        if target.scale <= 0:
            why = f"the scale of {target.name} is {target.scale:g}, and has to be positive"
            raise _unsupported("lora_alpha", target.alpha, why)
    return linear


def _check_head(linear: Iterable[str], base: BaseModel | None) -> None:
    """Raises FailedPrecondition for an adapted head that is the embedding, too, or may be: PEFT has
    changed both then, and A and B of the head are half of it."""
    head = next((name for name in linear if name.rpartition(".")[2] == OUTPUT_LAYER), None)
    if head is None:
        return
    if base is None:
        raise FailedPrecondition(
            f"{head} is adapted: give --model DIR, too, the base model, which shows whether its "
            "embedding is the same weight and so was changed too",
            subject=head,
        )
    if base.has_tied_head():
        raise FailedPrecondition(
            f"{head} is adapted, and in {base.folder} it is one weight with the embedding, which "
            f"was changed too: that is no LoRA of the head; {_INSTEAD}",
            subject=head,
        )


def _check_copies(
    checkpoint: Checkpoint, linear: Mapping[str, TargetWeights], base: BaseModel | None
) -> tuple[str, ...]:
    """Returns the names of the base weights that were saved along, none of which is converted: the
    weights of linear targets are the changed ones. Raises FailedPrecondition if others are not the
    base model's, or may not be."""
    for copy in checkpoint.replacements:
        if copy.name in linear:
            continue
        name = f"{copy.name}.weight"
        if base is None:
            raise FailedPrecondition(
                f"{copy.record.key} was saved with the adapter: give --model DIR, too, the base "
                "model, to compare it with",
                subject=copy.name,
            )
        with open_file(checkpoint.folder, copy.record.file) as file:
            difference = base.difference(name, SavedTensor(file, copy.record))
        if difference:
            raise FailedPrecondition(
                f"{name} {difference}: without it the adapter would compute something else; "
                f"{_INSTEAD}",
                subject=name,
            )
    return tuple(each.name for each in checkpoint.replacements)


def _read_initial(folder: GivenFolder, checkpoint: Checkpoint, *, is_scaled: bool) -> SavedWeights:
    """Reads the initial adapter in `folder`, which errors name."""
    try:
        initial = SavedWeights(folder, LIMITS, is_scaled=is_scaled)
        initial.check(checkpoint.targets)
    except InvalidAdapter as error:
        message = f"the initial adapter in {shown(folder.path)}: {error.message}"
        raise InvalidAdapter(message, subject=error.subject, reason=error.reason) from error
    return initial


def _computed(method: str, base: BaseModel | None, checkpoint: Checkpoint) -> ComputedWeights:
    if base is None:
        raise FailedPrecondition(
            f"init_lora_weights={show(method)}: give --model DIR, the base model that the adapter "
            f"was trained on, or {_INITIAL}",
            subject="init_lora_weights",
        )
    fan_in_fan_out = checkpoint.config.extras.fan_in_fan_out
    return ComputedWeights(method, base, fan_in_fan_out=fan_in_fan_out)


class _Writer:
    """Writes the weights, one module at a time, and sums up the changes."""

    def __init__(
        self, checkpoint: Checkpoint, initial: InitialWeights, is_any_start_taken: bool
    ) -> None:
        self._checkpoint, self._initial = checkpoint, initial
        self._is_any_start_taken = is_any_start_taken
        self._changed = self._began = 0.0  # sums of squares

    def change(self) -> float:
        """Returns the change, as a part of the start of training. Raises FailedPrecondition if
        either is nothing."""
        if self._began == 0:
            raise FailedPrecondition(
                "the initial adapter is B @ A = 0, with which the base stays as it is: the adapter "
                "is a plain LoRA, register it as it is",
                subject="initial",
            )
        change = math.sqrt(self._changed / self._began)
        if change <= _NEGLIGIBLE:
            raise FailedPrecondition(
                "the adapter equals the start of training: give the trained one as IN, and the "
                "one before training as --initial",
                subject="initial",
            )
        return change

    def write(self, folder: Path, progress: Progress) -> None:
        """Writes all of them to WEIGHTS_FILE in a folder. Raises FailedPrecondition if there is no
        room."""
        targets = list(self._checkpoint.targets.values())
        targets.sort(key=lambda each: -_outputs(each)[0][1].itemsize)  # so all are aligned
        outputs = [each for target in targets for each in _outputs(target)]
        header = encode_header(outputs)
        needed = len(header) + sum(math.prod(shape) * dt.itemsize for _, dt, shape in outputs)
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise FailedPrecondition(
                f"{needed} bytes are needed for {WEIGHTS_FILE}, and {free} are free",
                subject=WEIGHTS_FILE,
            )
        with (folder / WEIGHTS_FILE).open("xb") as file:
            file.write(header)
            for index, target in enumerate(targets):
                progress(index, len(targets), target.name)
                for tensor in self._convert(target):
                    file.write(tensor.view(torch.uint8).numpy().data)

    def _convert(self, target: TargetWeights) -> Iterator[torch.Tensor]:
        """Yields the tensors of `_outputs`, row-major."""
        a, b = map(self._checkpoint.read_tensor, (target.a, target.b))
        if target.kind is TargetKind.EMBEDDING:
            yield from (a.view(-1), b.view(-1))
            return
        trained = Factors(a.double(), b.double())
        initial = self._initial.read(target)
        difference, changed = subtract(trained, initial)
        self._check_start(target, changed, product_norm(trained))
        self._changed += (target.scale * changed) ** 2
        self._began += (target.scale * product_norm(initial)) ** 2
        dtype = TORCH_DTYPES[_dtype(target)]
        for factor in difference:
            tensor = factor.to(dtype).contiguous().view(-1)
            if not torch.isfinite(tensor).all():
                raise InvalidAdapter(
                    f"{target.name}: the converted values are beyond {dtype}",
                    subject=target.name,
                    reason="NOT_FINITE",
                )
            yield tensor

    def _check_start(self, target: TargetWeights, changed: float, trained: float) -> None:
        """Raises FailedPrecondition for A and B that are nearer to nothing than to the start of
        PiSSA and OLoRA, which are large parts of the base: of them training leaves most."""
        if changed < trained or self._is_any_start_taken:
            return
        raise FailedPrecondition(
            f"{target.name}: its A and B are further from the stated start of training than from "
            "zero: is it another base model, or another initial adapter? --force converts it "
            "all the same",
            subject=target.name,
        )


def subtract(trained: Factors, initial: Factors) -> tuple[Factors, float]:
    """Returns A and B whose product is the product of `trained` less the product of `initial`, of
    the rank of both together and of equal norms; and the Frobenius norm of the product."""
    left = torch.cat([trained.b, -initial.b], 1)
    right = torch.cat([trained.a, initial.a], 0)
    rank = left.shape[1]
    basis_out, core_out = torch.linalg.qr(left)
    basis_in, core_in = torch.linalg.qr(right.T)
    u, values, vt = torch.linalg.svd(core_out @ core_in.T, full_matrices=False)
    roots = values.sqrt()
    b, a = basis_out @ (u * roots), (roots[:, None] * vt) @ basis_in.T
    missing = rank - len(values)  # where a side of the weight is smaller than the rank
    pad = torch.nn.functional.pad
    return Factors(pad(a, (0, 0, 0, missing)), pad(b, (0, missing))), float(values.norm())


def product_norm(factors: Factors) -> float:
    """Returns the Frobenius norm of B @ A."""
    square = ((factors.b.T @ factors.b) * (factors.a @ factors.a.T)).sum()
    return math.sqrt(max(0.0, float(square)))


def _outputs(target: TargetWeights) -> tuple[_Output, _Output]:
    """Returns the names, types and shapes of a converted target."""
    path = f"{PREFIX}{target.module}"
    if target.kind is TargetKind.EMBEDDING:
        return (
            (f"{path}.lora_embedding_A", target.a.dtype, target.a.shape),
            (f"{path}.lora_embedding_B", target.b.dtype, target.b.shape),
        )
    dtype, rank = _dtype(target), 2 * target.rank
    return (
        (f"{path}.lora_A.weight", dtype, (rank, target.in_features)),
        (f"{path}.lora_B.weight", dtype, (target.out_features, rank)),
    )


def _dtype(target: TargetWeights) -> DataType:
    """Returns the type to write: A's and B's, but no fp8, which has scales of its own."""
    a, b = (
        torch.bfloat16 if each.dtype.itemsize == 1 else TORCH_DTYPES[each.dtype]
        for each in (target.a, target.b)
    )
    return _DTYPES[torch.promote_types(a, b)]


def _num_bytes(checkpoint: Checkpoint) -> int:
    return sum(
        record.length_bytes for each in checkpoint.targets.values() for _, record in each.records()
    )


def _converted_config(fields: Mapping[str, Any], kept: Iterable[TargetWeights]) -> dict[str, Any]:
    """Returns the config of the converted adapter: twice the rank at the same scale, except for
    `kept` targets."""
    factor = math.sqrt(2) if fields.get("use_rslora") else 2
    ranks = {each.module: each.rank for each in kept}
    alphas = {each.module: each.alpha for each in kept}
    rank_pattern, alpha_pattern = (fields.get(f"{key}_pattern") or {} for key in ("rank", "alpha"))
    changed = {
        "init_lora_weights": True,
        "r": 2 * fields.get("r", DEFAULT_RANK),
        "lora_alpha": factor * fields.get("lora_alpha", DEFAULT_ALPHA),
        # The first pattern that matches counts.
        "rank_pattern": ranks | {k: 2 * v for k, v in rank_pattern.items() if k not in ranks},
        "alpha_pattern": alphas
        | {k: factor * v for k, v in alpha_pattern.items() if k not in alphas},
    }
    unused = {key: value for key, value in _METHOD_CONFIGS.items() if key in fields}
    return {**fields, **changed, **unused}


def _unsupported(key: str, value: Any, why: str) -> InvalidAdapter:
    return InvalidAdapter(
        f"{CONFIG_FILE}: {key}={show(value)}: {why}", subject=key, reason="CONFIG_UNSUPPORTED"
    )
