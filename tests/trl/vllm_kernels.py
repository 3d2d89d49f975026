"""Products by quantised weights for vLLM's CPU build, where it has no code for them.

It has INT4 with AVX-512, and neither INT8 nor FP8 with plain inputs. The kernels here dequantise a
weight once, after vLLM has loaded it, and multiply in fp32. vLLM chooses them among its own: it
reads the config, finds the scheme of each layer, allocates and fills its tensors and unpacks the
codes as it does for its own kernels.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.kernels.linear import (
    _POSSIBLE_WFP8A16_KERNELS,
    CPUWNA16LinearKernel,
    FP8ScaledMMLinearLayerConfig,
    MPLinearKernel,
    MPLinearLayerConfig,
    ScaledMMLinearKernel,
    register_linear_kernel,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    unpack_quantized_values_into_int32,
)
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import PlatformEnum, current_platform


def add_missing() -> None:
    """Lets vLLM choose the kernels here where it has none of its own, in this process."""
    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        # vLLM takes this kernel for all of INT4, and fails only when it multiplies.
        os.environ["VLLM_DISABLED_KERNELS"] = CPUWNA16LinearKernel.__name__
    register_linear_kernel(DequantisedIntegers, PlatformEnum.CPU, "mp")
    _POSSIBLE_WFP8A16_KERNELS[PlatformEnum.CPU].append(DequantisedFp8)  # has no public function


def kernels_of(model: nn.Module) -> dict[str, str]:
    """Returns the name of the kernel of each layer that is quantised, by the layer's name."""
    schemes = {name: getattr(layer, "scheme", None) for name, layer in model.named_modules()}
    return {
        name: type(getattr(scheme, "kernel", None) or scheme.linear_kernel).__name__
        for name, scheme in schemes.items()
        if scheme is not None
    }


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the product of inputs, [..., in], by a weight, fp32 [N, in], in the inputs' dtype."""
    return nn.functional.linear(x.float(), weight, None if bias is None else bias.float()).to(x)


class DequantisedIntegers(MPLinearKernel):
    """Symmetric integers, packed as compressed-tensors has them."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        return not c.zero_points, "has no zero points"

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        packed, scales, _ = self._get_weight_params(layer)
        form = self.config.weight_type
        codes = unpack_quantized_values_into_int32(packed.data, form, packed_dim=1) - form.bias
        groups = codes.float().unflatten(1, (scales.shape[1], -1))
        replace_parameter(
            layer, self.w_q_name, (groups * scales.data.float()[..., None]).flatten(1)
        )

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return _product(x, getattr(layer, self.w_q_name), bias)


class DequantisedFp8(ScaledMMLinearKernel[FP8ScaledMMLinearLayerConfig, Any]):
    """FP8 with a scale for each output, and plain inputs."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        return c.weight_quant_key.scale.group_shape.is_per_channel(), "has a scale for each output"

    def _get_layer_params(self, layer: nn.Module) -> tuple[Tensor, Tensor]:
        weight, scales, *_ = self.layer_param_names
        return getattr(layer, weight), getattr(layer, scales)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight, scales = self._get_layer_params(layer)  # [in, N] and [N, 1]
        replace_parameter(
            layer, self.layer_param_names[0], weight.data.t().float() * scales.data.float()
        )

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return _product(x, self._get_layer_params(layer)[0], bias)
