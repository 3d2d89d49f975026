"""The definition of routing against transformers' own routers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from kernels.experts import (
    Choice,
    Routing,
    Scoring,
    combine,
    experts_linear,
    own_pairs,
    reference,
    route,
    sort_pairs,
)

HIDDEN, EXPERTS, TOKENS = 24, 12, 40


def config(**fields: object) -> SimpleNamespace:
    sizes = {"num_experts": EXPERTS, "num_local_experts": EXPERTS, "hidden_size": HIDDEN}
    return SimpleNamespace(**sizes, num_experts_per_tok=3, **fields)


CASES = {
    "qwen": (Qwen3MoeTopKRouter(config(norm_topk_prob=False)), Choice(3)),
    "qwen, normalised": (
        Qwen3MoeTopKRouter(config(norm_topk_prob=True)),
        Choice(3, normalised=True),
    ),
    "mixtral": (MixtralTopKRouter(config()), Choice(3, normalised=True)),
    "gpt-oss": (GptOssTopKRouter(config()), Choice(3, Scoring.SOFTMAX_OF_CHOSEN)),
    "glm": (
        Glm4MoeTopkRouter(
            config(routed_scaling_factor=2.5, n_group=4, topk_group=2, norm_topk_prob=True)
        ),
        Choice(3, Scoring.SIGMOID, normalised=True, num_groups=4, num_chosen_groups=2, scale=2.5),
    ),
    "glm, one group": (
        Glm4MoeTopkRouter(
            config(routed_scaling_factor=1.0, n_group=1, topk_group=1, norm_topk_prob=False)
        ),
        Choice(3, Scoring.SIGMOID),
    ),
}


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(3)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = torch.randn(tensor.shape, generator=generator)
    return module


def by_expert(experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns weights [T, EXPERTS], 0 for those that are not chosen."""
    return torch.zeros(len(experts), EXPERTS).scatter_(1, experts.long(), weights)


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_experts_and_weights_are_transformers(case):
    theirs, choice = CASES[case]
    randomised(theirs)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(5))
    logits, weights, experts = theirs(x)
    bias = getattr(theirs, "e_score_correction_bias", None)
    found = route(logits, choice, bias)
    torch.testing.assert_close(by_expert(*found), by_expert(experts, weights))
    assert found.experts.dtype == torch.int32
    if bias is None:  # theirs ascend or descend as they like
        assert (found.weights.diff(dim=1) <= 0).all()


@torch.inference_mode()
def test_experts_may_have_scales():
    theirs = randomised(Gemma4TextRouter(config(rms_norm_eps=1e-6, top_k_experts=3)))
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(5))
    _, weights, experts = theirs(x)
    logits = theirs.proj(theirs.norm(x) * theirs.scale * HIDDEN**-0.5)
    scales = theirs.per_expert_scale.data
    found = route(logits, Choice(3, normalised=True), expert_scales=scales)
    torch.testing.assert_close(by_expert(*found), by_expert(experts, weights))


def test_of_equal_logits_the_first_experts_are_chosen():
    found = route(torch.zeros(2, EXPERTS), Choice(3))
    assert found.experts.tolist() == [[0, 1, 2]] * 2


def test_pairs_are_in_the_order_of_experts():
    experts = torch.tensor([[2, 0], [0, 3], [2, 3]], dtype=torch.int32)
    pairs = sort_pairs(experts, 5)
    assert pairs.tokens.tolist() == [0, 1, 0, 2, 1, 2]
    assert pairs.starts.tolist() == [0, 2, 2, 4, 6, 6]
    assert pairs.rows.tolist() == [[2, 0], [1, 4], [3, 5]]


def test_pairs_of_one_expert_may_be_in_another_order():
    experts = torch.tensor([[2, 0], [0, 3], [2, 3]], dtype=torch.int32)
    pairs = sort_pairs(experts, 5, torch.tensor([2, 0, 1]))
    assert pairs.tokens.tolist() == [0, 1, 2, 0, 2, 1]
    assert pairs.starts.tolist() == [0, 2, 2, 4, 6, 6]
    assert pairs.rows.tolist() == [[3, 0], [1, 5], [2, 4]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_may_be_gathered(dtype):
    experts = torch.tensor([[2, 0], [0, 3], [2, 3]], dtype=torch.int32)
    pairs = sort_pairs(experts, 4)
    x, weight = torch.randn(3, 8).to(dtype), torch.randn(4, 5, 8).to(dtype)
    for compute in (experts_linear, reference.experts_linear):
        found = compute(x, weight, pairs, None, pairs.tokens)
        assert torch.equal(found, compute(x[pairs.tokens], weight, pairs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_pair_is_computed_by_its_expert(dtype):
    experts = torch.tensor([[2, 0], [0, 3], [2, 3]], dtype=torch.int32)
    pairs = sort_pairs(experts, 4)
    x, weight, bias = torch.randn(3, 8), torch.randn(4, 5, 8), torch.randn(4, 5)
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    made = reference.experts_linear(x[pairs.tokens], weight, pairs, bias)
    weights = torch.rand(3, 2)
    shared, logits = torch.randn(3, 5).to(dtype), torch.randn(3, 1)
    expected = torch.zeros(3, 5)
    for t in range(3):
        for j, expert in enumerate(experts[t].tolist()):
            row = x[t].float() @ weight[expert].float().T + bias[expert].float()
            expected[t] += weights[t, j] * row.to(dtype).float()
    torch.testing.assert_close(combine(made, pairs, weights), expected.to(dtype))
    expected += logits.sigmoid() * shared.float()
    torch.testing.assert_close(combine(made, pairs, weights, shared, logits), expected.to(dtype))
    same = experts_linear(x[pairs.tokens], weight, pairs, bias)
    torch.testing.assert_close(same, made)


def test_a_step_may_have_no_tokens():
    found = route(torch.zeros(0, EXPERTS), Choice(3))
    assert isinstance(found, Routing)
    pairs = sort_pairs(found.experts, EXPERTS)
    assert combine(torch.zeros(0, 4), pairs, found.weights).shape == (0, 4)


def test_pairs_of_some_experts() -> None:
    """Outputs of the pairs of all parts of the experts add up, also of a part without any."""
    torch.manual_seed(2)
    x, weight = torch.randn(TOKENS, HIDDEN), torch.randn(EXPERTS, HIDDEN, HIDDEN)
    routing = route(torch.randn(TOKENS, EXPERTS), Choice(3))
    routing.experts[routing.experts == EXPERTS - 1] = 0

    def combined(experts: tuple[int, int]) -> torch.Tensor:
        pairs = own_pairs(sort_pairs(routing.experts, EXPERTS), experts)
        made = experts_linear(x[pairs.tokens], weight[slice(*experts)], pairs)
        assert len(made) == pairs.starts[-1]
        return combine(made, pairs, routing.weights)

    parts = [combined(each) for each in ((0, 5), (5, EXPERTS - 1), (EXPERTS - 1, EXPERTS))]
    torch.testing.assert_close(sum(parts), combined((0, EXPERTS)))
    assert not parts[-1].any()
