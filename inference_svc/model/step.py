"""A step that torch is computing, operation by operation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from inference_svc.model.checkpoint.weights import ModelWeights
from inference_svc.model.description import Norm
from inference_svc.model.inputs import StepInputs
from inference_svc.model.kv_caches import KVCaches
from inference_svc.model.layers import RotaryEmbedding, TorchLinear
from inference_svc.model.lora import Lora
from inference_svc.model.operations import Op, Rows, Value
from inference_svc.model.rope import Rope
from inference_svc.model.sharding.exchange import Exchange, StagedExchange
from kernels.elementwise import NormWeight
from kernels.elementwise.addend import Addend
from kernels.lora import TokenOrder
from kernels.recurrence import Segments


@dataclass(slots=True)
class Step:
    """A step that is being computed: its inputs, and the values that are still to be read.

    `columns` are the columns that operations copy, int64 [width of the output]. `rows`, int64 [N],
    are the tokens that get logits. `choices` say where experts are to be that tokens choose, by the
    layer: int32 [T, num_chosen]. The next operation that reads a value adds its addend. Adapters
    may have up to `num_added_tokens` behind the vocabulary.
    """

    weights: ModelWeights[TorchLinear]
    rotary: Mapping[tuple[Rope, int], RotaryEmbedding]
    inputs: StepInputs
    kv_caches: KVCaches
    lora: Lora | None
    columns: Mapping[Op, Tensor]
    rows: Tensor
    choices: Mapping[int, Tensor]
    token_order: TokenOrder | None
    exchange: Exchange | None = None
    num_added_tokens: int = 0
    values: dict[Value, Any] = field(default_factory=dict)
    addends: dict[Value, Addend] = field(default_factory=dict)

    @property
    def ranks(self) -> Exchange:
        """The other ranks, of a model that is cut."""
        assert self.exchange is not None, "the model is not cut"
        return self.exchange

    @property
    def stages(self) -> StagedExchange:
        """The other stages, of a model that has several."""
        assert isinstance(self.exchange, StagedExchange)
        return self.exchange

    @property
    def device(self) -> torch.device:
        return self.inputs.token_ids.device

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return self.weights.dtype

    def states(self, op: Op) -> tuple[tuple[Tensor, ...], Segments]:
        """Returns the recurrent states of an operation's layer, each [slots, ...] as its mixer
        describes it, and the step's segments."""
        plan = self.inputs.recurrent
        assert plan is not None
        return plan.states.layers[op.of_layer], plan.of_kernels

    def norm(self, norm: Norm | None, layer: int | None, rows: Rows) -> NormWeight | None:
        """Returns the weight of a norm of these rows, for each where adapters have one."""
        weight = self.weights.norm(norm, layer)
        if norm is None or weight is None or self.lora is None or not norm.module:
            return weight
        return self.lora.norm(norm.path(layer), weight, logits_only=rows is Rows.LOGITS)
