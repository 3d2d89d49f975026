"""Adapters beside a recorded step's products: what runs there is ordered before whatever reads it,
after whatever it reads, and gives the bits of adapters in line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.gpu_model.launches import COMPUTE, META, Launch, Noted, launches, storage_id
from inference_svc.backends.cuda.padded_sizes import StepKind, StepShape
from inference_svc.model.description import Rank
from inference_svc.model.layers import Linear
from inference_svc.model.sharding.description import of_rank
from kernels import tuning
from tests.support.gpu.features import FEATURES
from tests.support.gpu.lora import GROUP, Bench, rows_of
from tests.support.gpu.models import MAX_ROWS, Alone, Eager, Model, make_decoder, run, steps

pytestmark = pytest.mark.matrix

BESIDE = "beside"
WRITTEN = {
    "shrink_kernel": ("y",),
    "expand_kernel": ("out",),
    "few_rows_kernel": ("out",),
    "sum_splits_kernel": ("out",),
    "int8_inputs_kernel": ("codes", "scales"),
    "cat": (),
}
"""Arguments that kernels write; others may write all of theirs."""
PRODUCTS = {"linear", "few_rows_kernel", "sum_splits_kernel", "int8_inputs_kernel", "cat"}
"""The kernels of a product: of weights in few bits, and of several parts, it has several."""
IN_LINE = {
    "cohere2": {"o"},  # both halves' sum has no norm of its own
    "olmo2": {"qkv"},  # norms of all heads
    "qwen2 experts": {"down"},  # the half that all experts share
    "glm4 experts": {"down"},
    "gemma4 experts": {"down"},
    "qwen3.5": {"qkv"},  # queries and their gates are taken apart
    "qwen3-next": {"qkv", "down"},
}
"""Groups of some layer that are in line although others of their name need not be."""


def decoded(model: Model, kind: StepKind, size: int = 4) -> Noted:
    backend = model.fixed(lambda compute: None, is_warm=False)
    with launches() as noted:
        backend.compute(StepShape.of_decodes(kind, size))
    return noted


@pytest.fixture(scope="module", params=FEATURES)
def model(request: pytest.FixtureRequest, tmp_path_factory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    return Model.make(make_decoder(request.param, folder), torch.float16, META)


@pytest.fixture(scope="module")
def lora_step(model: Model) -> Noted:
    return decoded(model, StepKind.LORA)


def storages(launch: Launch, *, written: bool) -> set[int]:
    """Returns the memory that a launch uses, or only what it writes."""
    if launch.grid is None and launch.name == "linear":
        tensors = [*launch.outputs, *(() if written else launch.tensors)]
    elif written and launch.name in WRITTEN:
        tensors = [launch.arguments[name] for name in WRITTEN[launch.name]]
    else:
        tensors = [*launch.outputs, *launch.tensors]
    return {storage_id(tensor) for tensor in tensors}


def races(noted: Noted) -> Iterator[tuple[str, str]]:
    """Yields launches of two streams that nothing orders, and of which one writes what the other
    uses."""
    for one in noted.launches:
        for other in noted.critical if one.stream == BESIDE else ():
            if one.may_overlap(other):
                used, changed = (
                    (storages(one, written=written), storages(other, written=written))
                    for written in (False, True)
                )
                if used[0] & changed[1] or used[1] & changed[0]:
                    yield one.name, other.name


def test_nothing_beside_the_step_races_with_it(lora_step):
    assert list(races(lora_step)) == []
    beside = [launch for launch in lora_step.launches if launch.stream == BESIDE]
    assert beside
    for launch in beside:
        products = [each for each in lora_step.critical if launch.may_overlap(each)]
        assert products
        assert {each.name for each in products} <= PRODUCTS, "it runs beside its product alone"


@pytest.mark.parametrize("ignored", [COMPUTE, BESIDE])
def test_both_waits_are_needed(tmp_path, monkeypatch, ignored):
    """The join, for which the step waits, and the fork."""
    model = Model.make(make_decoder("llama", tmp_path), torch.float16, META)
    wait = Noted.wait
    monkeypatch.setattr(
        Noted, "wait", lambda noted, at, on: None if at.name == ignored else wait(noted, at, on)
    )
    readers = {other for _, other in races(decoded(model, StepKind.LORA))}
    if ignored == COMPUTE:
        assert {"store_kernel", "swiglu_kernel", "add_rms_norm_kernel"} <= readers
    assert readers


def test_shrunk_rows_are_of_their_own_stream(lora_step):
    """Their memory may be taken by the next launch of the stream that they were allocated on."""
    shrunk = {
        storage_id(launch.arguments["y"])
        for launch in lora_step.launches
        if launch.stream == BESIDE and launch.name == "shrink_kernel"
    }
    for launch in lora_step.critical:
        assert not shrunk & storages(launch, written=False)


def test_groups_beside_and_in_line(request, model, lora_step):
    """All groups of attention and of dense halves but where something else comes between."""
    noted, layout = lora_step, model.arena.layout
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for launch in noted.launches:
        if launch.name == "shrink_kernel":
            group = layout.targets[launch.arguments["first_target"]].group
            found[launch.stream == BESIDE].add(
                group.rpartition(".")[2] if "experts" not in group else "experts"
            )
    feature = request.node.callspec.params["model"]
    odd = next((groups for name, groups in IN_LINE.items() if feature.startswith(name)), set())
    dense = {"qkv", "o", "gate_up", "down"}
    assert found[False] & dense == odd & (found[True] | found[False])
    assert {"qkv", "o"} - odd <= found[True]


@pytest.mark.parametrize("kind", [StepKind.BASE, StepKind.ANY])
def test_other_steps_are_on_one_stream(model, kind):
    noted = decoded(model, kind)
    assert len(noted.critical) == len(noted.launches)


def test_steps_that_are_not_recorded_are_on_one_stream(model):
    backend = model.fixed(None, is_warm=False)
    prepared = backend.prepare(steps([0, 0, 1, 2, 2])[2])
    for compute in (
        lambda: backend.compute(StepShape.of_decodes(StepKind.LORA, 4)),
        lambda: backend.forward(prepared),
    ):
        with launches() as noted:
            compute()
        assert len(noted.critical) == len(noted.launches)
        assert any(launch.name == "expand_kernel" for launch in noted.launches)


@pytest.mark.parametrize(
    ("most_rows", "size", "is_beside"), [(0, 1, False), (3, 4, False), (4, 4, True)]
)
def test_the_table_chooses(tmp_path, most_rows, size, is_beside):
    model = Model.make(make_decoder("llama", tmp_path), torch.float16, META)
    with tuning.overridden("beside", most_rows=most_rows):
        noted = decoded(model, StepKind.LORA, size)
    assert any(launch.stream == BESIDE for launch in noted.launches) == is_beside
    addends = [launch.arguments.get("addend") for launch in noted.launches]
    assert any(addend is not None for addend in addends) == is_beside
    rounds = {launch.arguments.get("ROUNDS") for launch in noted.launches} - {None}
    assert rounds == {most_rows > 0}, "in line, too: a row's bits do not depend on the way"


def test_full_precision_is_in_line(tmp_path):
    """A sum in line may be one fused operation, whose bits no addend can have."""
    model = Model.make(make_decoder("llama", tmp_path), torch.float32, META)
    noted = decoded(model, StepKind.LORA)
    assert len(noted.critical) == len(noted.launches)


def test_outputs_without_targets_keep_their_group_in_line():
    """Nobody would write these columns of an addend."""
    bench = Bench(torch.float16)
    bench.fill(rows_of([1, 2]))
    step = bench.lora.padded_step(StepShape.of_decodes(StepKind.LORA, 2))
    x, out = bench.inputs(2)
    assert step is not None
    width = out.shape[1]
    linears = [
        Linear(torch.ones(num_outputs, x.shape[1]).half()) for num_outputs in (width, width + 1)
    ]
    beside, in_line = (step.beside(GROUP, x, linear) for linear in linears)
    assert in_line is None
    assert beside is not None
    assert torch.equal(beside[0], linears[0](x))


@pytest.mark.parametrize("feature", FEATURES)
def test_definitions_add_what_adapters_in_line_add(tmp_path, feature):
    """Torch's operations, of which those in line round once: beside, twice."""
    model = Model.make(make_decoder(feature, tmp_path), torch.float16, torch.device("cpu"))
    batches = steps([-1, 0, 1, 2, 2])
    beside = run(model.fixed(Eager), batches)
    in_line = run(model.plain(), batches)
    for one, other in zip(beside, in_line, strict=True):
        torch.testing.assert_close(one.values, other.values, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["llama", "qwen3.5, a gated delta net, a gate of attention"])
def test_adapters_before_sums_give_the_bits_of_adapters_in_line(tmp_path, name: str) -> None:
    """Of products that ranks sum next: A's product runs beside the base's."""
    decoder = of_rank(make_decoder(name, tmp_path), Rank(0, 2))
    cpu, found = torch.device("cpu"), []
    for most_rows in (MAX_ROWS, 1):
        with tuning.overridden("beside", most_rows=most_rows):
            model = Model.make(decoder, torch.float16, cpu, exchange=Alone())
            found.append(run(model.fixed(Eager), steps([-1, -1, 0, 1, 1])))
    for beside, in_line in zip(*found, strict=True):
        assert torch.equal(beside.values, in_line.values)


def test_launches_before_sums(tmp_path) -> None:
    """A's product waits for its inputs alone, and B's for both products."""
    decoder = of_rank(make_decoder("llama", tmp_path), Rank(0, 2))
    model = Model.make(decoder, torch.float16, META, exchange=Alone())
    noted = decoded(model, StepKind.LORA).launches
    shrunk = [index for index, each in enumerate(noted) if each.name == "shrink_kernel"]
    streams = [noted[index].stream for index in shrunk]
    assert streams == [BESIDE] * 4 * decoder.num_layers + [COMPUTE]
    after = [noted[index + 1 : index + 3] for index in shrunk[:-1]]
    before_sums = [names for names in after if names[-1].name == "expand_kernel"]
    assert len(before_sums) == 2 * decoder.num_layers, "o and down"
    for product, expanded in before_sums:
        assert product.name == "linear"
        assert (product.stream, expanded.stream) == (COMPUTE, COMPUTE)
