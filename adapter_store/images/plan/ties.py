"""Changes that follow because the base has one weight in two places."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from adapter_store.checkpoint.peft.config import AdapterConfig
from adapter_store.checkpoint.peft.module_patterns import OUTPUT_LAYER
from adapter_store.checkpoint.tensors import TargetWeights
from adapter_store.checkpoint.weights import Replacement
from adapter_store.images.plan.uses import Use, incompatible, key_of
from contract.images.layouts import Layout


def with_ties(uses: list[Use], layout: Layout, config: AdapterConfig) -> list[Use]:
    """Adds the changes that follow because the base has one weight in two places, as PEFT loads it.

    Rows of an embedding are its tied head's, too, unless the head has rows of its own. A copy that
    was saved along takes the place of the one weight; if both have one the head's, which is loaded
    last. LoRA and saved modules are of one of the two, or with ensure_weight_tying of both; if both
    have one, the head's again. Raises IncompatibleAdapter.
    """
    tied = [(index, target) for index, target in enumerate(layout.targets) if target.tied_to]
    for index, head in tied:
        [column] = (i for i, each in enumerate(layout.targets) if each.name == head.tied_to)
        if config.extras.ties_embeddings:
            uses = _with_tied_lora(uses, layout, (column, index), config)
        of_embedding, of_head = _replacement_of(uses, column), _replacement_of(uses, index)
        one = of_head or of_embedding
        if config.extras.saves_tied and one is not None:
            uses = [use for use in uses if use.changes not in (of_embedding, of_head)]
            uses += (Use(each, layout.targets[each], one) for each in (column, index))
            continue
        if of_embedding is not None and of_embedding.is_whole:
            continue
        if of_head is not None and of_head.is_copy:
            if of_embedding is not None and of_embedding.is_copy:
                uses = [use for use in uses if use.changes is not of_embedding]
            uses.append(Use(column, layout.targets[column], of_head))
        elif of_embedding is not None and _is_heads_too(of_embedding, of_head):
            uses.append(Use(index, head, of_embedding))
    _check_shared_rows(uses)
    if config.extras.ties_embeddings and not tied:
        _check_untied(uses, config)
    return uses


def _with_tied_lora(
    uses: list[Use], layout: Layout, columns: tuple[int, int], config: AdapterConfig
) -> list[Use]:
    """Gives a tied head and its embedding the A and B of the head, or else of the embedding; each
    keeps its own scale. Raises IncompatibleAdapter."""
    of_embedding, of_head = (_lora_of(uses, column) for column in columns)
    own = of_head or of_embedding
    if own is None:
        return uses
    column, replaced = (columns[1], None) if of_head is None else (columns[0], of_embedding)
    target = layout.targets[column]
    magnitude = None if replaced is None else replaced.magnitude
    if own.magnitude is not None and magnitude is None:
        detail = f"{target.name}, which ensure_weight_tying ties to it, has none"
        raise incompatible(own.magnitude.key, "TARGET_MISSING", detail)
    settings = config.settings_for(target.name if replaced is None else replaced.module)
    turned = dataclasses.replace(
        own,
        kind=target.kind,
        scale=settings.scale,
        a=own.b,
        b=own.a,
        is_transposed=not own.is_transposed,
        bias=None,
        magnitude=magnitude,
    )
    kept = [use for use in uses if replaced is None or use.changes is not replaced]
    return [*kept, Use(column, target, turned)]


def _check_untied(uses: Iterable[Use], config: AdapterConfig) -> None:
    """Requires that the config names the head, or its weight as a parameter, if it has A and B:
    no embedding is tied to it."""
    for use in uses:
        changes = use.changes
        if (
            isinstance(changes, TargetWeights)
            and changes.name == OUTPUT_LAYER
            and not config.selects(changes.module, is_embedding=False)
            and not config.extras.parameters_of(changes.module)
        ):
            raise incompatible(
                key_of(changes),
                "TARGET_UNKNOWN",
                "only ensure_weight_tying adapts it, as the embedding, and the server does not say "
                "that its base ties the two",
            )


def _lora_of(uses: Iterable[Use], column: int) -> TargetWeights | None:
    found = (use.changes for use in uses if use.column == column)
    return next((changes for changes in found if isinstance(changes, TargetWeights)), None)


def _is_heads_too(of_embedding: Replacement, of_head: Replacement | None) -> bool:
    """Returns whether it changes the head, which has this of its own. A copy and rows of its own
    are one too many, which `_check_once` refuses."""
    return of_head is None or (of_embedding.is_copy and not of_head.is_whole)


def _replacement_of(uses: Iterable[Use], column: int) -> Replacement | None:
    found = (use.changes for use in uses if use.column == column)
    return next((changes for changes in found if isinstance(changes, Replacement)), None)


def _check_shared_rows(uses: Iterable[Use]) -> None:
    """Requires that modules whose rows are in the config and not in the file are tied."""
    for use in uses:
        for entry in use.changes.shared_by if isinstance(use.changes, Replacement) else ():
            sharing = (each for each in uses if each.changes is use.changes)
            if not any(each.target.name.endswith(entry) for each in sharing):
                raise incompatible(
                    key_of(use.changes),
                    "TARGET_MISSING",
                    f"trainable_token_indices has {entry}, of which the file has no rows, and the "
                    f"base's is not tied to {use.target.name}",
                )
