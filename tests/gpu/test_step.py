"""A whole step on the device gives what torch gives on the CPU: every feature of the decoder, with
prompts, decodes and padding, with adapters and without."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from inference_svc.backends.cuda.graphs import CudaRecorder
from inference_svc.model.description import Rank
from inference_svc.model.sharding.description import of_rank
from kernels import tuning
from tests.support.gpu.features import FEATURES, PLAIN
from tests.support.gpu.models import (
    MAX_ADDED,
    MAX_ROWS,
    SUM,
    Alone,
    Eager,
    Model,
    assert_close,
    make_decoder,
    run,
    run_scored,
    steps,
)

TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
LOOSER = {"gemma4": 5, "qwen3.5": 5, "qwen3-next": 5}
"""Of models whose scores nothing scales: in half precision random ones are far from each other. Or
whose states have random decays: rounding in a state is in all later tokens."""
LOOSER_IN_BFLOAT16 = {"qwen3 experts": 3, "qwen3-next": 2}
"""Its experts have nearly equal scores, and rounding chooses."""
BASE, ALL, SOME, KINDS = [-1] * 5, [0, 0, 1, 2, 2], [-1, -1, 0, 1, 1], [1, -1, 0, 1, 2]
"""Adapters of the five rows."""
SUMS = [SUM, -1, 0, SUM, 2]
NUM_STEPS, NUM_PROMPTS = 6, 2
"""How many `steps` there are, and how many have prompts."""


@pytest.fixture
def check_equal(tmp_path, device, on_device):
    """`check_equal(feature, dtype, slots)` computes the same steps in both ways."""

    def check(
        feature: str,
        dtype: torch.dtype,
        slots: list[int],
        num_added: int | None = None,
        num_steps: int = NUM_STEPS,
        **changes: Any,
    ) -> None:
        """`num_added`: adapters have more than A and B, one of them so many tokens. Changes are of
        the model's config."""
        decoder = make_decoder(feature, tmp_path, **changes)
        host, there = (Model.make(decoder, dtype, at) for at in (torch.device("cpu"), device))
        if num_added is not None:
            host, there = (each.with_kinds(num_added) for each in (host, there))
        num_added = num_added or 0
        first_token = decoder.vocab_size if num_added else 0
        wanted = run(host.plain(num_added), steps(slots, first_token)[:num_steps])
        with on_device():
            # The interpreter compiles nothing, and takes its time.
            is_cuda = device.type == "cuda"
            record = CudaRecorder() if is_cuda else Eager
            backend = there.fixed(record, is_warm=is_cuda, max_added_tokens=num_added)
            got = run(backend, steps(slots, first_token)[:num_steps])
            scored = run_scored(backend, steps(slots, first_token, 1)[:NUM_PROMPTS])
        name, is_bfloat16 = feature.partition(",")[0], dtype == torch.bfloat16
        tolerance = TOLERANCES[dtype]
        tolerance *= LOOSER.get(name, 1) if dtype != torch.float32 else 1
        tolerance *= LOOSER_IN_BFLOAT16.get(name, 1) if is_bfloat16 else 1
        assert_close(wanted, got, tolerance, is_bfloat16=is_bfloat16)
        prompts = run_scored(host.plain(num_added), steps(slots, first_token, 1)[:NUM_PROMPTS])
        assert_close(prompts, scored, tolerance, is_bfloat16=is_bfloat16)
        assert backend.num_replays + backend.num_eager_steps == num_steps + NUM_PROMPTS
        if is_cuda:  # the warm-up has recorded all decode steps
            assert num_steps - NUM_PROMPTS <= backend.num_replays <= num_steps

    return check


@pytest.fixture
def qwen3(tmp_path, device):
    return Model.make(make_decoder("qwen3, norms of heads", tmp_path), torch.float16, device)


@pytest.fixture(params=["qwen3, norms of heads", "qwen3.5, a gated delta net, a gate of attention"])
def model(request, tmp_path, device):
    return Model.make(make_decoder(request.param, tmp_path), torch.float16, device)


@pytest.mark.smoke
def test_one_layer(check_equal):
    check_equal("qwen3, norms of heads", torch.float16, SOME, num_hidden_layers=1)


@pytest.mark.smoke
def test_one_layer_with_adapters_of_every_kind(check_equal):
    """Prompts beside each other, and recorded decodes: vectors, rows, added tokens, whole weights,
    norms, and the base model."""
    check_equal(
        *("qwen3, norms of heads", torch.float16, KINDS),
        num_added=MAX_ADDED,
        num_steps=NUM_PROMPTS + 1,
        num_hidden_layers=1,
    )


@pytest.mark.smoke
@pytest.mark.parametrize("slots", [BASE, SOME], ids=str)
def test_a_padded_prompt_is_the_prompt(qwen3, on_device, slots):
    """Of one layer, alone and beside decodes, with more rows than it has, and empty ones."""
    prompt = steps(slots)[0]
    with on_device():
        backend = qwen3.fixed(Eager, is_warm=False)
        first = run(backend, [prompt])[0].values.clone()
        assert backend.use_idle_time()
        second = run(backend, [prompt])[0].values.clone()
    assert (backend.num_eager_steps, backend.num_replays) == (1, 1)
    torch.testing.assert_close(first, second, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("feature", FEATURES)
def test_features_with_adapters_of_every_kind(check_equal, feature):
    num_added = 0 if feature.startswith("gemma4") else MAX_ADDED  # inputs of layers have no more
    check_equal(feature, torch.float32, KINDS, num_added=num_added)


@pytest.mark.real
@pytest.mark.parametrize("feature", PLAIN)
def test_bfloat16_with_adapters_of_every_kind(check_equal, feature):
    check_equal(feature, torch.bfloat16, KINDS, num_added=0)


@pytest.mark.parametrize("slots", [BASE, ALL, SOME], ids=str)
@pytest.mark.parametrize("feature", PLAIN)
def test_features(check_equal, feature, slots):
    check_equal(feature, torch.float32, slots)


@pytest.mark.parametrize("feature", FEATURES)
def test_half_precision(check_equal, feature):
    check_equal(feature, torch.float16, ALL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_sums_of_adapters(check_equal, dtype):
    check_equal("qwen3, norms of heads", dtype, SUMS)


def test_a_sum_of_adapters_of_several_kinds(check_equal):
    """Vectors of one over rows of another, and over its norms."""
    check_equal("qwen2, biases", torch.float32, SUMS, num_hidden_layers=1, num_added=0)


@pytest.mark.real
@pytest.mark.parametrize("feature", FEATURES)
def test_bfloat16(check_equal, feature):
    check_equal(feature, torch.bfloat16, ALL)


def test_warm_up_leaves_pages_alone(tmp_path, device, on_device):
    decoder = make_decoder("llama", tmp_path, num_hidden_layers=1)
    model = Model.make(decoder, torch.float16, device)
    caches = model.caches()
    [cache] = caches.caches
    cache.data.fill_(1.5)
    with on_device():
        model.fixed(None, caches=caches)
    assert (cache.data[:, :-1] == 1.5).all(), "what sequences may own"
    assert (cache.data[:, -1] != 1.5).any(), "padding's page"


@pytest.mark.real
@pytest.mark.parametrize("slots", [BASE, ALL, SOME], ids=str)
def test_replay_is_bitwise_the_computed_step(model, slots):
    """At the same padded size: a wider product may be another one."""
    captured = run(model.fixed(CudaRecorder()), steps(slots))
    for one, got in zip(captured, run(model.fixed(Eager), steps(slots)), strict=True):
        assert torch.equal(one.values, got.values)


BESIDE = [
    pytest.param("qwen3, norms of heads", {"num_hidden_layers": 1}, marks=pytest.mark.smoke),
    ("gemma2, soft caps, wide norms on both sides, geglu", {}),
    ("granite, multipliers", {}),
]


@pytest.mark.parametrize(("feature", "changes"), BESIDE)
def test_beside_is_bitwise_in_line(tmp_path, device, on_device, feature, changes):
    """Recorded steps whose adapters run on a stream of their own, and steps of more than one row
    whose adapters are in line, as the tuning table can choose."""
    decoder = make_decoder(feature, tmp_path, **changes)
    model = Model.make(decoder, torch.float16, device)
    is_cuda = device.type == "cuda"
    batches, found = steps(SOME), []
    for most_rows in (MAX_ROWS, 1):
        with on_device(), tuning.overridden("beside", most_rows=most_rows):
            backend = model.fixed(CudaRecorder() if is_cuda else Eager, is_warm=is_cuda)
            found.append(run(backend, batches))
    for beside, in_line in zip(*found, strict=True):
        assert torch.equal(beside.values, in_line.values)


def test_before_sums_is_bitwise_in_line(tmp_path, device, on_device):
    """Adapters of products that ranks sum: A's product runs on the other stream."""
    decoder = of_rank(make_decoder("llama", tmp_path, num_hidden_layers=1), Rank(0, 2))
    model = Model.make(decoder, torch.float16, device, exchange=Alone())
    is_cuda = device.type == "cuda"
    found = []
    for most_rows in (MAX_ROWS, 1):
        with on_device(), tuning.overridden("beside", most_rows=most_rows):
            backend = model.fixed(CudaRecorder() if is_cuda else Eager, is_warm=is_cuda)
            found.append(run(backend, steps(SOME)))
    for beside, in_line in zip(*found, strict=True):
        assert torch.equal(beside.values, in_line.values)


@pytest.mark.real
def test_replays_beside_wait_for_each_other(qwen3):
    """Many in a row, of which the host awaits none: the next step's launches follow all of the one
    before, on both streams."""
    backend = qwen3.fixed(CudaRecorder())
    run(backend, steps(ALL)[:NUM_PROMPTS])
    decodes = steps(ALL)[NUM_PROMPTS:] * 20
    replayed = run(backend, decodes)
    run(backend, steps(ALL)[:NUM_PROMPTS])
    for batch, together in zip(decodes, replayed, strict=True):
        [alone] = run(backend, [batch])
        torch.cuda.synchronize()
        assert torch.equal(alone.values, together.values)


@pytest.mark.real
def test_steps_do_not_synchronize(model):
    """Nor compile: the warm-up has."""
    backend = model.fixed(CudaRecorder())
    run(backend, steps(ALL)[:3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            run(backend, steps(ALL))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.real
def test_workspace_has_the_recordings(qwen3):
    eager, recorded = qwen3.fixed(None).workspace_bytes, qwen3.fixed(CudaRecorder()).workspace_bytes
    assert recorded > max(eager, 1 << 20)
