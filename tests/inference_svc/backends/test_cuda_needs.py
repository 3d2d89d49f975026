"""What the CUDA backend is said to take is what its operations allocate, and little more."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu_model.launches import META, launches, noted_kernels
from bench.gpu_model.step import Exchanged
from inference_svc.adapters.targets import lora_groups
from inference_svc.backends.cuda import needs as cuda_needs
from inference_svc.backends.cuda.padded_sizes import StepKind, StepShape, decode_sizes
from inference_svc.core import Request, Sequence
from inference_svc.engine.compute import sampler
from inference_svc.engine.compute.sampler import Sampler
from inference_svc.model.checkpoint.parameters import weight_formats
from inference_svc.model.layers import QuantisedLinear
from inference_svc.model.sharding.stages import of_stage
from kernels import tuning
from kernels.quantised import QuantisedWeight
from kernels.sampling import reference
from tests.support.gpu.features import FEATURES
from tests.support.gpu.live_bytes import live_bytes
from tests.support.gpu.models import (
    MAX_ROWS,
    Eager,
    Model,
    make_decoder,
)
from tests.support.gpu.needs import (
    MOST,
    SPARED_NODES,
    choose_the_first,
    config_of,
    num_kernels,
    peak_bytes,
)
from tests.support.gpu.pictures import READERS, make_reader
from tests.support.inference.results import asking
from tests.support.models.quantised import FORMATS
from tests.support.pairs import pairwise

pytestmark = pytest.mark.matrix

MODELS: list[tuple[str, dict[str, int]]] = [
    ("qwen3, norms", {"num_attention_heads": 16}),
    ("qwen3, norms", {"intermediate_size": 512}),
    ("qwen3, norms", {"vocab_size": 8192}),
    ("qwen3, norms", {"hidden_size": 256}),
    ("gemma4, larger", {"hidden_size_per_layer_input": 256}),
    ("qwen3 experts, ", {"moe_intermediate_size": 256}),
    ("qwen3 experts, ", {"num_experts_per_tok": 5, "hidden_size": 256}),
    ("qwen3.5", {"linear_value_head_dim": 128}),
    ("qwen3.5", {"num_attention_heads": 16, "linear_num_key_heads": 4}),
    ("qwen3-next", {"linear_num_value_heads": 32}),
    ("qwen2 in int4", {"num_attention_heads": 16}),
    ("qwen2 in int4", {"vocab_size": 8192}),
    ("granite in int8", {"intermediate_size": 1024}),
    ("gpt-oss experts in mxfp4", {"intermediate_size": 256}),
]
"""Models whose attention, feed-forward, head, residual stream, what layers are told of tokens,
experts, what these read, gated delta nets and attention with a gate take most; and weights in few
bits: outputs of several parts, sums of split products, and inputs that are rounded."""


def model_of(case: tuple[str, dict[str, int]], folder: Path) -> Model:
    begins, changes = case
    name = next(each for each in FEATURES if each.startswith(begins))
    description = make_decoder(name, folder, **changes)
    return Model.make(description, torch.float32, torch.device("cpu"))


@pytest.fixture(params=MODELS, ids=str)
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Model:
    return model_of(request.param, tmp_path)


@pairwise(
    case=MODELS,
    num_tokens=[MAX_ROWS, 64, 512],
    lora_targets=[(), ("q_proj",), ("o_proj", "lm_head")],
)
def test_a_step_takes_no_more(tmp_path, case, num_tokens, lora_targets):
    model = model_of(case, tmp_path)
    with noted_kernels(choose_the_first):
        backend = model.fixed(None, is_warm=False, max_tokens=num_tokens, lora_targets=lora_targets)
        peak = peak_bytes(backend, num_tokens, has_decodes=True)
    config = config_of(num_tokens, lora_targets=lora_targets)
    planned = cuda_needs.step_bytes(config, model.transformer.description, num_tokens)
    assert peak <= planned <= MOST * peak, "more would be memory that could be pages"


@pytest.mark.parametrize("lora_targets", [(), ("o_proj", "lm_head")], ids=str)
def test_a_step_with_adapters_beside_it_takes_no_more(model, lora_targets):
    """Addends, and the shrunk rows of one adapter for each token."""
    num_rows = 4
    with noted_kernels(choose_the_first), tuning.overridden("beside", most_rows=num_rows):
        backend = model.fixed(Eager, is_warm=False, lora_targets=lora_targets)
        step = backend.steps.decodes
        step.inputs.fill_padding(StepShape.of_decodes(StepKind.LORA, num_rows))
        lora = step.lora.padded_step(StepShape.of_decodes(StepKind.LORA, num_rows))
        shape = StepShape.of_decodes(StepKind.LORA, num_rows)
        inputs = step.step_inputs(backend.states, shape)
        with live_bytes() as live:
            backend.transformer.forward(inputs, backend.kv_caches, lora)
    config = config_of(num_rows, lora_targets=lora_targets)
    config = replace(config, max_sequences=num_rows)
    planned = cuda_needs.step_bytes(config, model.transformer.description, num_rows, is_beside=True)
    assert live.peak <= planned <= MOST * live.peak


def test_recorded_steps_have_addends(monkeypatch, model):
    """If there are few enough rows, and adapters beside the step take more than those in line."""
    asked: list[tuple[int, bool]] = []

    def noted(config: Any, decoder: Any, num_tokens: int, *, is_beside: bool = False) -> int:
        asked.append((num_tokens, is_beside))
        return 1 << 40 if is_beside else 0

    monkeypatch.setattr(cuda_needs, "step_bytes", noted)
    for most_rows in (3, 64):
        with tuning.overridden("beside", most_rows=most_rows):
            needs = cuda_needs.memory_needs(config_of(70), model.transformer.description)
        assert needs.graphs_bytes > 1 << 40
    beside = [num_tokens for num_tokens, is_beside in asked if is_beside]
    assert beside == [64, 64], "of a prompt; the default table may be any device's"


@pytest.mark.parametrize("name", FORMATS)
def test_rows_in_few_bits_are_plain_in_so_much_memory(name: str) -> None:
    """Dividing DoRA's magnitudes copies rows to fp32."""
    weight = QuantisedWeight.empty(FORMATS[name], 512, 512, torch.device("cpu"))
    weight.put_rows(0, torch.randn(512, 512, generator=torch.Generator().manual_seed(0)))
    linear = QuantisedLinear(weight)
    with live_bytes() as live:
        linear.rows(0, 512).to(torch.float32, copy=True)
    assert live.peak <= cuda_needs.DEQUANTISED_BYTES * 512 * 512


def test_what_is_held_between_steps(model):
    check_held(model)


def check_held(model: Model) -> None:
    backend = model.fixed(None, is_warm=False)
    config = config_of(70, dtype="float32")
    planned = cuda_needs._fixed_bytes(config, model.transformer.description)
    table = backend.arena.table
    held = backend.workspace_bytes + table.rows.nbytes + table.weight_rows.nbytes
    assert held <= planned <= 1.3 * held


@pytest.mark.parametrize("name", READERS)
def test_pictures_are_counted(tmp_path, name):
    """Embeddings at fixed addresses, further inputs, and the kernels that read them."""
    decoder = make_reader(name, tmp_path)
    check_held(Model.make(decoder, torch.float32, torch.device("cpu")))
    on_device = Model.make(decoder, torch.bfloat16, META).fixed(lambda compute: None, is_warm=False)
    with launches() as noted:
        on_device.compute(StepShape(StepKind.BASE, 64, MAX_ROWS, has_prompts=True))
    counted = num_kernels([launch.name for launch in noted.launches])
    nodes = cuda_needs.recorded_nodes(decoder, StepKind.BASE, 0)
    assert counted <= nodes + decoder.num_layers <= counted + SPARED_NODES + decoder.num_layers


def test_a_stage_that_takes_in_no_pictures_holds_none(tmp_path):
    decoder = of_stage(make_reader("gemma3", tmp_path), 1, 2)
    model = Model.make(decoder, torch.float32, torch.device("cpu"), exchange=Exchanged(1))
    assert model.fixed(None, is_warm=False).steps.prompts.pictures is None
    check_held(model)


@pytest.mark.parametrize("feature", FEATURES)
def test_recorded_kernels_are_counted(tmp_path, feature):
    """Of every family, and hardly more: or kernels that are forgotten would be within what is too
    many."""
    description = make_decoder(feature, tmp_path)
    model = Model.make(description, torch.bfloat16, META)
    num_groups = len(lora_groups(model.arena.layout))
    backends = {
        max_added_tokens: model.fixed(
            lambda compute: None, is_warm=False, max_added_tokens=max_added_tokens
        )
        for max_added_tokens in (0, 7)
    }
    for kind, max_added_tokens in product(StepKind, backends):
        backend = backends[max_added_tokens]
        with launches() as noted:
            backend.compute(StepShape.of_decodes(kind, 1))
        names = [launch.name for launch in noted.launches]
        counted = num_kernels(names)
        planned = cuda_needs.recorded_nodes(
            description, kind, num_groups, adds_tokens=max_added_tokens > 0
        )
        assert counted <= planned <= counted + SPARED_NODES, names


@pytest.mark.parametrize("changes", [{}, {"top_p": 0.9}, {"repetition_penalty": 1.5}], ids=str)
def test_choosing_tokens_takes_no_more(monkeypatch, changes):
    monkeypatch.setattr(sampler, "SORTED_ROWS", 1)
    monkeypatch.setattr(reference, "SORTED_ROWS", 1)
    asked = asking({"logprobs": 5, "seed": 1, **changes})
    sequences = [Sequence(Request(str(row), (1, 2, 3), **asked)) for row in range(8)]
    logits = torch.randn(8, 100_000, generator=torch.Generator().manual_seed(0))
    with live_bytes() as live:
        Sampler((), has_device_memory=True).sample(logits, sequences)
    assert live.peak <= cuda_needs.SAMPLER_COPIES * logits.nbytes


def test_more_of_anything_needs_more(model):
    config, description = config_of(70), model.transformer.description
    needs = cuda_needs.memory_needs(config, description)
    for change in ({"max_sequences": 64}, {"max_batch_tokens": 1 << 14}):
        more = cuda_needs.memory_needs(replace(config, **change), description)
        assert more.step_bytes > needs.step_bytes
    eager = cuda_needs.memory_needs(replace(config, record_steps=False), description)
    assert eager.step_bytes == needs.workspace_bytes


def test_fewer_targets_need_less(model):
    config, description = config_of(1 << 14), model.transformer.description
    every = cuda_needs.memory_needs(config, description)
    some = cuda_needs.memory_needs(replace(config, lora_targets=("o_proj",)), description)
    fewer_kernels = 2 * 3 * description.num_layers * len(decode_sizes(MAX_ROWS))
    less = every.graphs_bytes - some.graphs_bytes
    assert less >= fewer_kernels * cuda_needs.NODE_BYTES
    assert some.workspace_bytes <= every.workspace_bytes
    # Else others than adapters of projections take the most.
    if description.max_intermediate_size >= 512 and not weight_formats(description):
        assert some.workspace_bytes < every.workspace_bytes
