"""Feed-forward halves: dense ones, and mixtures of experts."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from inference_svc.model.description.modules import Cut, ExpertsProjection, Norm, Projection
from kernels.experts import Choice


class Activation(enum.Enum):
    """By the names of config.json. QUICK_GELU: x * sigmoid(1.702 x)."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
    GELU = "gelu"
    QUICK_GELU = "quick_gelu"


@dataclass(frozen=True, slots=True)
class Dense:
    """down(activation(gate) * up); or, unless it `is_gated`, down(activation(up)), and then
    `gate_up` makes up alone."""

    activation: Activation
    gate_up: Projection
    down: Projection
    is_gated: bool = True

    @property
    def size(self) -> int:
        return self.down.in_features


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """(up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit`, and up between -limit and
    limit (GPT-OSS)."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses the experts of a token by logits, which the projection makes of the half's input, or
    of the norm of the residual stream. `bias` is the tensor that is added to scores to choose by,
    `expert_scales` the tensor that weights are multiplied by; both have a number for each
    expert."""

    projection: Projection
    choice: Choice
    norm: Norm | None = None
    bias: str = ""
    expert_scales: str = ""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: the sum of the outputs of a token's experts, each down(activation(gate)
    * up), weighed as the router says, and of the part that all share: a dense half, times
    sigmoid(shared_gate) if there is such a gate.

    With a `norm` experts read the norm of the residual stream, and not the dense half's input. The
    outputs of both have post-norms of their own.
    """

    router: Router
    activation: Activation | ClampedSwiglu
    gate_up: ExpertsProjection
    down: ExpertsProjection
    shared: Dense | None = None
    shared_gate: Projection | None = None
    norm: Norm | None = None
    post_norm: Norm | None = None
    shared_post_norm: Norm | None = None

    def __post_init__(self) -> None:
        assert self.shared is not None or self.shared_gate is None
        assert (self.norm is None) == (self.router.norm is None)
        assert (self.post_norm is None) == (self.shared_post_norm is None)

    @property
    def num_experts(self) -> int:
        """All experts that tokens choose of."""
        return self.gate_up.experts.whole

    @property
    def cut(self) -> Cut | None:
        """The experts that this rank has; None: all."""
        return self.gate_up.cut

    @property
    def num_chosen(self) -> int:
        return self.router.choice.num_chosen

    @property
    def size(self) -> int:
        """The size of one expert."""
        return self.down.in_features


@dataclass(frozen=True, slots=True)
class LayerInput:
    """out(activation(gate(x)) * e), e being the layer's part of the output of `LayerInputs`."""

    activation: Activation
    gate: Projection
    out: Projection
