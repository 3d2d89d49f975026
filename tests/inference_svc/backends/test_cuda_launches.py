"""How many kernels a recorded decode step launches, each some microseconds that nothing hides."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch

from bench.gpu_model.launches import META, launches
from inference_svc.backends.cuda.padded_sizes import StepKind, StepShape
from tests.support.gpu.models import Model, make_decoder

NUM_LAYERS = 32
FEW_LAYERS = 4
LIMITS = {StepKind.BASE: 327, StepKind.LORA: 340, StepKind.ANY: 700}
"""On the critical path, by what the rows' adapters have."""
MOST_BESIDE = 2 * 4 * NUM_LAYERS


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """`model_of(num_layers)`, made once; tests do not change it."""

    @cache
    def make(num_layers: int) -> Model:
        folder = tmp_path_factory.mktemp("model")
        description = make_decoder("llama", folder, num_hidden_layers=num_layers)
        return Model.make(description, torch.bfloat16, META)

    return make


@pytest.mark.parametrize("kind", LIMITS)
def test_a_decode_step_launches_few_kernels(model_of, kind):
    backend = model_of(NUM_LAYERS).fixed(lambda compute: None, is_warm=False)
    with launches() as noted:
        backend.compute(StepShape.of_decodes(kind, 1))
    counts = Counter(launch.name for launch in noted.launches)
    critical = Counter(launch.name for launch in noted.critical)
    assert critical.total() <= LIMITS[kind], str(critical)
    beside = counts - critical
    assert beside.total() == (MOST_BESIDE if kind is StepKind.LORA else 0)
    assert set(beside) <= {"shrink_kernel", "expand_kernel"}
    assert counts["add_rms_norm_kernel"] == 2 * NUM_LAYERS + 1
    assert counts["swiglu_kernel"] == counts["store_kernel"] == NUM_LAYERS
    assert counts["rotary_angles_kernel"] == counts["argmax"] == 1
    assert ("shrink_kernel" in counts) == (kind is not StepKind.BASE)


@pytest.mark.parametrize(
    ("lora_targets", "num_kernels"),
    [
        ((), 2 * (4 * FEW_LAYERS + 1) + 1),
        (("q_proj", "v_proj"), 2 * FEW_LAYERS),
        (("o_proj", "lm_head"), 2 * (FEW_LAYERS + 1)),
        (("embed_tokens",), 1),
    ],
)
def test_nothing_is_launched_for_targets_that_are_refused(model_of, lora_targets, num_kernels):
    """For each group that has an accepted target two kernels, for the embedding one."""
    model = model_of(FEW_LAYERS)
    counts = []
    backend = model.fixed(lambda compute: None, is_warm=False, lora_targets=lora_targets)
    for kind in (StepKind.BASE, StepKind.LORA):
        with launches() as noted:
            backend.compute(StepShape.of_decodes(kind, 1))
        counts.append(Counter(launch.name for launch in noted.launches))
    base, found = counts
    assert not base - found, "the base is computed as ever"
    of_lora = found - base
    assert of_lora.total() == num_kernels, str(of_lora)
