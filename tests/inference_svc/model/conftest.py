"""Small random models of transformers, and our decoders with their weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from inference_svc.backends.native.adapter_ops import AdapterOps
from inference_svc.backends.native.buffers import BatchPages, StepArrays
from inference_svc.backends.native.program import NativeTransformer
from inference_svc.backends.native.projections import PackedProjections
from inference_svc.backends.native.workspace import Workspace
from inference_svc.model.architectures import load_description
from inference_svc.model.checkpoint.weights import load_weights
from inference_svc.model.kv_caches import KVCaches
from inference_svc.model.layers import TorchProjections
from inference_svc.model.recurrent_states import RecurrentStates
from inference_svc.model.transformer import Transformer
from tests.support.models.decoders import (
    MAX_TOKENS,
    NUM_CELLS,
    Decoder,
    NativeDecoder,
    NoAdapters,
    TorchDecoder,
)
from tests.support.models.families import TEXT_PARTS
from tests.support.models.whole_models import SHAPE
from tests.support.native import native_library

_POSITIVE = ("norm.weight", "layernorm_1.weight", "layernorm_2.weight", "scale")
"""What the names of parameters end with that multiply."""


@pytest.fixture(autouse=True)
def one_thread():
    """Runs with one thread: the models are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def random_model() -> Callable[..., PreTrainedModel]:
    """`random_model("Llama", key=value, ...)`: a seeded model in fp32.

    Its weights are larger than at the start of training, and its norms and biases not trivial, so
    that attention is far from uniform and every parameter shows in the logits.
    """

    def make(family: str, **changes: Any) -> PreTrainedModel:
        torch.manual_seed(0)
        name = f"{family}TextConfig" if family in TEXT_PARTS else f"{family}Config"
        config = getattr(transformers, name)(**(SHAPE | changes))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(_POSITIVE):
                    parameter.uniform_(0.5, 1.5)
                elif name.endswith(("bias", "sinks")):
                    parameter.normal_(std=0.5)
                else:
                    parameter.mul_(4)
            for name, buffer in model.named_buffers():
                if name.endswith("layer_scalar"):
                    buffer.uniform_(0.5, 1.5)
                elif name.endswith(("e_score_correction_bias", "expert_bias")):
                    buffer.normal_(std=0.5)
        return model

    return make


@pytest.fixture
def save_model(tmp_path: Path) -> Callable[..., Path]:
    def save(model: PreTrainedModel, **options: Any) -> Path:
        folder = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(folder, **options)
        return folder

    return save


@pytest.fixture
def load_decoder() -> Callable[..., Decoder]:
    """`load_decoder(folder, dtype, page_size, path)`; path: "torch", "native" with keys and values
    in rows, or "tiled", native with them tiled. Native ones may have `adapters`."""

    def load(
        folder: Path,
        dtype: torch.dtype = torch.float32,
        page_size: int = 4,
        path: str = "torch",
        adapters: AdapterOps | None = None,
        max_model_len: int = NUM_CELLS,
    ) -> Decoder:
        description = load_description(folder).for_length(max_model_len)
        cache = KVCaches.allocate(
            description,
            num_pages=NUM_CELLS // page_size,
            page_size=page_size,
            dtype=dtype,
            prefers_tiles=path == "tiled",
        )
        states = None
        if description.recurrences:
            states = RecurrentStates.allocate(description, 2 * MAX_TOKENS)
        if path == "torch":
            weights = load_weights(folder, description, dtype, "cpu", TorchProjections())
            return TorchDecoder(cache, transformer=Transformer(description, weights), states=states)
        library = native_library()
        packed = load_weights(folder, description, dtype, "cpu", PackedProjections())
        pages = BatchPages(MAX_TOKENS, NUM_CELLS // page_size)
        arrays = StepArrays(MAX_TOKENS, MAX_TOKENS, page_size, pages)
        workspace = Workspace.allocate(description, MAX_TOKENS, MAX_TOKENS, dtype)
        transformer = NativeTransformer(
            description, packed, cache, arrays, workspace, adapters or NoAdapters(), library, states
        )
        return NativeDecoder(cache, transformer=transformer, arrays=arrays)

    return load


@pytest.fixture
def relative_rms() -> Callable[[torch.Tensor, torch.Tensor], float]:
    """`relative_rms(expected, got)`: root mean square of the error over that of `expected`."""

    def measure(expected: torch.Tensor, got: torch.Tensor) -> float:
        assert got.shape == expected.shape
        error = (got.double() - expected.double()).square().mean().sqrt()
        return float(error / expected.double().square().mean().sqrt())

    return measure
