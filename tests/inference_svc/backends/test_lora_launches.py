"""What backends say that a step launches for an adapter is what it launches. The native program's
operations are counted in tests/system/test_inspect.py."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.gpu_model.launches import FREE, META, launches
from contract.images.targets import TargetKind
from inference_svc import core
from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.targets import lora_groups
from inference_svc.backends.cuda.backend import CudaBackend
from inference_svc.core import BASE_SLOT
from inference_svc.model.description import EMBED_TOKENS
from kernels.lora import OutputVectors, ReplacedWeight, TableEntry
from kernels.lora.plan import LoraContents
from tests.support.gpu.models import Eager, Model, make_decoder, steps

CHOICES: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "one": ("v_proj",),
    "a part of a group": ("q_proj", "k_proj"),
    "embedding": ("embed_tokens",),
    "head": ("lm_head", "down_proj"),
    "all": ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"),
}
"""The modules of an adapter."""
SLOT = 1


def targets_of(layout: ModelLayout, modules: tuple[str, ...]) -> list[int]:
    return [index for index, each in enumerate(layout.targets) if each.module in modules]


def with_adapter(model: Model, modules: tuple[str, ...]) -> list[int]:
    """Puts an adapter of these modules into the table; returns its targets."""
    layout = model.arena.layout
    targets = targets_of(layout, modules)
    entries = [
        TableEntry(
            *(index, index, 2 * index, 2),
            *(layout.targets[index].in_features, layout.targets[index].out_features),
            is_embedding=layout.targets[index].kind is TargetKind.EMBEDDING,
        )
        for index in targets
    ]
    model.arena.table.set_row(SLOT, entries)
    return targets


def decode(slot: int) -> core.Batch:
    """One decode row that uses this slot."""
    batch = steps([slot] * 5)[4]
    assert len(batch.rows) == 1
    return batch


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model that computes nothing."""
    description = make_decoder("llama", tmp_path_factory.mktemp("model"))
    return Model.make(description, torch.float16, META)


def check_kernels(model: Model, backend: CudaBackend, contents: LoraContents) -> dict[str, int]:
    """Returns what the backend says that a decode step launches, which is what it launches."""
    counts = []
    for slot in (BASE_SLOT, SLOT):
        prepared = backend.prepare(decode(slot))
        with launches() as noted:
            backend.forward(prepared)
        counts.append(Counter(launch.name for launch in noted.launches))
    base, found = counts
    assert not base - found
    said = dict(backend.lora_launches(contents))
    assert (found - base).total() == sum(said.values()), str(found - base)
    kernels = {"shrink_kernel", "expand_kernel"}
    if contents.weights or contents.has_vectors:
        kernels |= {"token_weights_kernel", "replace_embeddings_kernel", "replace_logits_kernel"}
    assert set(found - base) <= kernels
    return said


@pytest.mark.parametrize("choice", CHOICES)
def test_kernels_of_a_gpu(meta: Model, choice: str) -> None:
    targets = with_adapter(meta, CHOICES[choice])
    groups, contents = lora_groups(meta.arena.layout), LoraContents(frozenset(targets))
    recorded = check_kernels(meta, meta.fixed(Eager, is_warm=False), contents)
    assert list(recorded) == list(groups)
    computed = check_kernels(meta, meta.fixed(None, is_warm=False), contents)
    own = set(targets)
    assert list(computed) == [name for name, each in groups.items() if own & set(each.targets)]


def test_kernels_of_a_gpu_that_is_restricted(meta: Model) -> None:
    contents = LoraContents(frozenset(with_adapter(meta, ("v_proj",))))
    backend = meta.fixed(Eager, is_warm=False, lora_targets=("q_proj", "v_proj"))
    assert set(check_kernels(meta, backend, contents)) == {"layers.0.qkv", "layers.1.qkv"}


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("weights", [(), ("lm_head",), ("model.norm", EMBED_TOKENS)], ids=str)
def test_kernels_for_what_is_replaced(
    meta: Model, weights: tuple[str, ...], *, is_recorded: bool
) -> None:
    """A recorded step has them for every weight, if its adapters have any more than A and B."""
    layout, table = meta.arena.layout, meta.arena.table
    targets = with_adapter(meta, ("q_proj",))
    places = [layout.weight_indices[name] for name in weights]
    vectors = {targets[0]: OutputVectors(bias=0)}
    replaced = tuple(ReplacedWeight(place, full=0) for place in places)
    table.set_row(SLOT, table.adapters[SLOT].with_others(vectors, {}, replaced))
    contents = LoraContents(frozenset(targets), frozenset(places), has_vectors=True)
    backend = meta.fixed(Eager if is_recorded else None, is_warm=False)
    said = check_kernels(meta, backend, contents)
    every = set(layout.weight_indices)
    assert every & said.keys() == (every if is_recorded else set(weights))


class Counted(TorchDispatchMode):
    """Counts torch's operations that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in FREE | {"narrow"}:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("choice", CHOICES)
def test_operations_of_torch(tmp_path: Path, choice: str, dtype: torch.dtype) -> None:
    model = Model.make(make_decoder("llama", tmp_path), dtype, torch.device("cpu"))
    targets = with_adapter(model, CHOICES[choice])
    backend, counts = model.plain(), []
    for slot in (BASE_SLOT, SLOT):
        prepared = backend.prepare(decode(slot))
        with Counted() as counted:
            backend.forward(prepared)
        counts.append(counted.counts)
    base, found = counts
    assert not base - found
    said = backend.lora_launches(LoraContents(frozenset(targets)))
    assert (found - base).total() == sum(said.values()), str(found - base)
