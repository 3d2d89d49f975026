"""The size of an adapter's changes: refuses scales of nothing, and warns of too large values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from adapter_store.checkpoint.peft.config import AdapterConfig
from adapter_store.checkpoint.peft.config_values import invalid_value
from adapter_store.checkpoint.reading.safetensors import Scanned
from adapter_store.checkpoint.tensors import Contents, TargetWeights
from adapter_store.checkpoint.weights import ExpertWeights

LARGEST_CHANGE = 1e4
"""The largest entry that scale * B A may have without a warning. Trained adapters have less than 1;
from here on values of the model overflow in float16, and soon in other types."""
LARGEST_VALUE = 1e4
"""The largest value without a warning of an adapter's biases and magnitudes, and of embeddings,
heads, norms and the base's biases that it replaces. Models have hundreds at most in these."""


def check_scales(contents: Contents, config: AdapterConfig) -> None:
    """Refuses A and B that the config scales to nothing. Adapters that a former release has stored
    are read all the same. Raises InvalidAdapter."""
    scaled: list[TargetWeights | ExpertWeights] = [*contents.targets.values(), *contents.experts]
    found = next((each for each in scaled if not each.scale), None)
    if found is None:
        return
    key = "scale"
    if found.alpha is not None:
        key = "alpha_pattern" if config.alpha else "lora_alpha"
    raise invalid_value(
        key,
        0,
        f"A and B of {found.name} would change nothing: set the value that it was trained with",
    )


def warnings_of(contents: Contents, scanned: Mapping[str, Scanned]) -> tuple[str, ...]:
    """Warns of the target that is changed most, and of the largest value that is saved as it is, if
    that is too much, as after a training run that diverged: its values are finite, and the model's
    will not be."""
    name, change = _largest(_changes(contents, scanned))
    saved, value = _largest(_values(contents, scanned))
    found = []
    if change > LARGEST_CHANGE:
        found.append(f"{name}: the product of A and B may have entries of up to {change:.1e}")
    if value > LARGEST_VALUE:
        found.append(f"{saved} up to {value:.1e}")
    return tuple(
        f"{each}, as after a training run that diverged: requests for this adapter may end with "
        "VALUES_NOT_FINITE"
        for each in found
    )


def _largest(sizes: Iterator[tuple[str, float]]) -> tuple[str, float]:
    return max(sizes, key=lambda each: each[1], default=("", 0.0))


def _values(contents: Contents, scanned: Mapping[str, Scanned]) -> Iterator[tuple[str, float]]:
    """Yields the tensors besides A and B, in words, and their largest values."""
    for target in contents.targets.values():
        if target.bias is not None:
            bias = abs(target.scale) * scanned[target.bias.key].largest
            yield f"{target.name}: the bias of B has values of", bias
        if target.magnitude is not None:
            magnitude = scanned[target.magnitude.key].largest
            yield f"{target.name}: its magnitudes have values of", magnitude
    for each in contents.replacements:
        what = "saved copy" if each.row_ids is None else "trained part"
        yield f"{each.name}: its {what} has values of", scanned[each.record.key].largest


def _changes(contents: Contents, scanned: Mapping[str, Scanned]) -> Iterator[tuple[str, float]]:
    """Yields each target's name, and a bound on the entries of scale * B A: each is a sum of as
    many products as the rank says."""
    for target in contents.targets.values():
        a, b = scanned[target.a.key].largest, scanned[target.b.key].largest
        yield target.name, abs(target.scale) * target.rank * a * b
    for experts in contents.experts:
        for index, (a_matrix, b_matrix) in experts.pairs.items():
            scale = experts.scales.get(index, experts.scale)
            a, b = (scanned[each.record.key].largest for each in (a_matrix, b_matrix))
            yield experts.name, abs(scale) * experts.rank * a * b
