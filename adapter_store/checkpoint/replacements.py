"""Base weights that an adapter has of its own: trained whole, some rows, or saved along.

    <module>.weight, <module>.bias                      of a module that modules_to_save names,
                                                        itself or a module around it
    <module>.bias, <module>.base_layer.bias             with bias="all"; with "lora_only" of adapted
                                                        modules
    <module>.token_adapter.trainable_tokens_delta       [rows, features], of trainable_token_indices
    <module>.base_layer.weight, embed_tokens.weight,    copies, which PEFT saves beside an adapted
    lm_head.weight                                      embedding or head, or one of another size

A state dict has `.modules_to_save.<name>` after the module. PEFT loads each of them in place of the
base's. A target is the module, or `<module>.bias`; kinds go by shape: a vector is VECTOR, and a
matrix LINEAR, also an embedding's, which only the model knows.

Tensors that the config does not name would stay unused, and named ones that the file does not have
were lost on the way: both are refused by name.

Sources: peft/utils/{other,save_and_load}.py and peft/tuners/tuners_utils.py of PEFT 0.21.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator

from adapter_store.checkpoint.peft.config_values import invalid_value
from adapter_store.checkpoint.peft.extras import (
    CLASSIFIERS,
    EMBEDDINGS,
    INPUTS,
    Extras,
    convolution_hint,
    refused,
)
from adapter_store.checkpoint.peft.tensor_keys import TensorKey
from adapter_store.checkpoint.reading.safetensors import TensorRecord
from adapter_store.checkpoint.weights import Replacement
from adapter_store.errors import InvalidAdapter
from contract.images.segment_kinds import SegmentKind
from contract.images.targets import TargetKind

VOCABULARIES = EMBEDDINGS | {"wte", "word_embeddings", "tok_embeddings", "output"}
"""Modules whose weights have a row for each token in every model."""


def read_replacements(
    tensors: Iterable[tuple[TensorKey, TensorRecord]], extras: Extras, adapted: Collection[str]
) -> tuple[Replacement, ...]:
    """Returns the weights that these tensors replace, by name, sorted. `adapted` are the modules
    that have A and B.

    Raises InvalidAdapter: TENSOR_UNKNOWN, TENSOR_DUPLICATE, SHAPE_INVALID or CONFIG_UNSUPPORTED,
    with the tensor as its subject, or TENSOR_MISSING, with a key of the config.
    """
    reader = _Reader(extras, adapted)
    found: dict[str, Replacement] = {}
    for key, record in tensors:
        if key.target in found:
            raise refused(record, "TENSOR_DUPLICATE", f"{key.target} has another tensor for this")
        found[key.target] = reader.read(key, record)
    reader.check_complete()
    return tuple(reader.with_shared_rows(found[name]) for name in sorted(found))


class _Reader:
    """Reads an adapter's tensors one by one; remembers which of the config's names they have."""

    def __init__(self, extras: Extras, adapted: Collection[str]) -> None:
        self._extras, self._adapted = extras, adapted
        self._used: set[str] = set()
        self._has_biases = False

    def read(self, key: TensorKey, record: TensorRecord) -> Replacement:
        if key.side is SegmentKind.ROWS:
            return self._read_rows(key, record)
        num_dimensions = len(record.shape)
        if num_dimensions not in ((1,) if key.kind is TargetKind.VECTOR else (1, 2)):
            raise refused(
                record,
                "SHAPE_INVALID",
                f"shape {list(record.shape)} is not of a matrix or vector, which alone can replace "
                f"the base's"
                f"{convolution_hint(key, record, 'modules_to_save')}",
            )
        is_vocabulary = key.module.rpartition(".")[2] in VOCABULARIES
        if num_dimensions == 2 and self._extras.fan_in_fan_out and not is_vocabulary:
            raise refused(
                record,
                "CONFIG_UNSUPPORTED",
                "with fan_in_fan_out it may be [in, out], which the file does not show: adapt "
                "the module with A and B instead",
            )
        kind = TargetKind.VECTOR if num_dimensions == 1 else TargetKind.LINEAR
        is_copy = self._is_copy(key, record)
        if is_copy and num_dimensions != 2:
            raise refused(record, "SHAPE_INVALID", f"shape {list(record.shape)} is not a matrix")
        return Replacement(key.target, key.module, kind, record, is_copy=is_copy)

    def _read_rows(self, key: TensorKey, record: TensorRecord) -> Replacement:
        entries = self._extras.token_ids
        entry = next((each for each in entries if key.module.endswith(each)), None)
        if entry is None:
            raise refused(
                record,
                "TENSOR_UNKNOWN",
                f"it would stay unused: trainable_token_indices does not name {key.module}",
            )
        if entry in self._used:
            raise refused(
                record,
                "TENSOR_DUPLICATE",
                "trainable_token_indices has ids for one module, and this is another's",
            )
        self._used.add(entry)
        if key.module in self._adapted:
            raise refused(
                record,
                "CONFIG_UNSUPPORTED",
                f"{key.module} has A and B, too, which PEFT does not apply with trained rows",
            )
        ids = entries[entry]
        if len(record.shape) != 2 or record.shape[0] != len(ids):
            raise refused(
                record,
                "SHAPE_INVALID",
                f"shape {list(record.shape)} does not match the {len(ids)} rows for which "
                "trainable_token_indices has ids",
            )
        return Replacement(key.target, key.module, TargetKind.LINEAR, record, ids)

    def _is_copy(self, key: TensorKey, record: TensorRecord) -> bool:
        """Returns whether it was saved along without being trained, as far as the config says."""
        module = key.module.removesuffix(".bias") if key.is_bias else key.module
        is_adapted = module in self._adapted
        entries = self._extras.entries_of(module)
        if key.is_bias and key.place != "modules_to_save":
            is_all = self._extras.bias == "all" and key.place == ""
            if is_all or (self._extras.bias != "none" and is_adapted):
                self._has_biases = True
                return False
        if entries and key.place != "base_layer":
            if is_adapted:
                raise refused(
                    record,
                    "CONFIG_UNSUPPORTED",
                    f"{module} has A and B, too, which PEFT does not apply with modules_to_save",
                )
            self._used |= entries
            return False
        is_known = module.rpartition(".")[2] in EMBEDDINGS and key.place == ""
        if is_known and not key.is_bias and self._extras.saves_tied and not is_adapted:
            return False
        if not key.is_bias and (is_known or (key.place == "base_layer" and is_adapted)):
            return True
        named = "modules_to_save does not name it"
        raise refused(
            record,
            "TENSOR_UNKNOWN",
            "a base weight that would stay unused: the config's "
            + (f"bias is {self._extras.bias}, and {named}" if key.is_bias else named),
        )

    def check_complete(self) -> None:
        extras = self._extras
        for entry in self._lost():
            raise _missing("modules_to_save", entry, "the file has no tensor of it")
        for entry in extras.token_ids:
            if entry not in self._used and not self._is_shared(entry):
                raise _missing(
                    "trainable_token_indices", entry or "embed_tokens", "the file has no rows of it"
                )
        if extras.bias != "none" and not self._has_biases:
            raise _missing(
                "bias",
                extras.bias,
                "the file has no biases: if the model has none, set it to 'none'",
            )

    def with_shared_rows(self, replacement: Replacement) -> Replacement:
        """Adds the modules of which PEFT saves no rows, where the base has one weight for both."""
        if replacement.row_ids is None or replacement.module.rpartition(".")[2] != INPUTS:
            return replacement
        lost = [entry for entry in self._extras.token_ids if entry not in self._used]
        return dataclasses.replace(replacement, shared_by=tuple(lost))

    def _is_shared(self, entry: str) -> bool:
        """Returns whether the input embedding has the same rows."""
        ids = self._extras.token_ids
        others = (each for each in self._used.intersection(ids) if each.endswith(INPUTS))
        return any(ids[each] == ids[entry] for each in others)

    def _lost(self) -> Iterator[str]:
        entries = self._extras.modules_to_save
        # PEFT names both by itself, whichever the model has.
        has_classifier = not CLASSIFIERS.isdisjoint(self._used)
        for entry in entries:
            if entry not in self._used and not (has_classifier and entry in CLASSIFIERS):
                yield entry


def _missing(key: str, value: str, detail: str) -> InvalidAdapter:
    return invalid_value(key, value, detail, "TENSOR_MISSING")
