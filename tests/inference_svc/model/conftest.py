"""Small random models of transformers, and our decoder, run over sequences in any chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from inference_svc import core
from inference_svc.backends.native import PackedProjections
from inference_svc.backends.native_buffers import BatchPages, StepArrays, Workspace
from inference_svc.backends.native_ops import AdapterOps
from inference_svc.backends.native_program import NativeTransformer
from inference_svc.model.architectures import load_description
from inference_svc.model.inputs import StepInputs
from inference_svc.model.kv_caches import KVCaches
from inference_svc.model.layers import Linear
from inference_svc.model.lora import Lora
from inference_svc.model.transformer import Transformer
from inference_svc.model.weights import load_weights
from kernels.elementwise import NormWeight
from kernels.experts import Pairs
from kernels.native.library import NativeOp
from tests.support.native import native_library
from tests.support.whole_models import SHAPE

TEXT_PARTS = ("Gemma3", "Gemma4")
"""Families whose models of text alone have another config."""

_POSITIVE = ("norm.weight", "layernorm_1.weight", "layernorm_2.weight", "scale")
"""What the names of parameters end with that multiply."""


@pytest.fixture(autouse=True)
def one_thread():
    """Runs with one thread: the models are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
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
                elif name.endswith("e_score_correction_bias"):
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


Rows = Sequence[tuple[core.Sequence, int, int, bool]]


@dataclass(eq=False)
class Decoder:
    """Our decoder with a cache, and sequences whose pages are scattered in it."""

    cache: KVCaches
    sequences: list[core.Sequence] = field(default_factory=list)

    def add(self, token_ids: Sequence[int]) -> core.Sequence:
        request = core.Request(str(len(self.sequences)), tuple(token_ids), core.SamplingParams())
        sequence = core.Sequence(request)
        used = sum(len(other.page_ids) for other in self.sequences)
        count = -(-len(token_ids) // self.cache.page_size)
        assert used + count <= self.cache.num_pages
        # 7 has no divisor in common with the number of pages: a walk over all of them.
        sequence.page_ids = [i * 7 % self.cache.num_pages for i in range(used, used + count)]
        self.sequences.append(sequence)
        return sequence

    def step(self, rows: Rows) -> torch.Tensor:
        """Rows of (sequence, first token, number of tokens, samples); fp32 logits after the last
        token of each."""
        raise NotImplementedError

    def every_logit(self, row: tuple[core.Sequence, int, int, bool]) -> torch.Tensor:
        """One row's step; fp32 logits after each of its tokens."""
        raise NotImplementedError

    def logits(self, token_ids: Sequence[int], chunk: int) -> torch.Tensor:
        """Logits after every token, computed `chunk` tokens at a time, the sequence being alone."""
        sequence, parts = self.add(token_ids), []
        for start in range(0, len(token_ids), chunk):
            count = min(chunk, len(token_ids) - start)
            parts.append(self.every_logit((sequence, start, count, True)))
        return torch.cat(parts)


@dataclass(eq=False, kw_only=True)
class TorchDecoder(Decoder):
    transformer: Transformer
    lora: Lora | None = None

    def step(self, rows: Rows) -> torch.Tensor:
        return self.transformer.forward(self._inputs(rows), self.cache, self.lora).float()

    def every_logit(self, row: tuple[core.Sequence, int, int, bool]) -> torch.Tensor:
        inputs = self._inputs([row])
        inputs = replace(inputs, logit_rows=torch.arange(len(inputs.token_ids)))
        return self.transformer.forward(inputs, self.cache, self.lora).float()

    def _inputs(self, rows: Rows) -> StepInputs:
        return StepInputs.build(batch_of(rows), self.cache.page_size)


@dataclass(eq=False, kw_only=True)
class NativeDecoder(Decoder):
    transformer: NativeTransformer
    arrays: StepArrays

    def step(self, rows: Rows) -> torch.Tensor:
        self.arrays.fill(batch_of(rows).columns())
        return self.transformer.forward().clone()

    def every_logit(self, row: tuple[core.Sequence, int, int, bool]) -> torch.Tensor:
        self.arrays.fill(batch_of([row]).columns())
        count = row[2]
        self.arrays.logit_rows[:count] = torch.arange(count)
        self.arrays.num_logits[0] = count
        return self.transformer.forward().clone()


def batch_of(rows: Rows) -> core.Batch:
    return core.Batch(tuple(core.BatchRow(*row) for row in rows))


class NoAdapters:
    def add(
        self,
        group: str,
        x: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        logits_only: bool,
    ) -> list[NativeOp]:
        return []

    def add_experts(
        self,
        group: str,
        x: torch.Tensor,
        out: torch.Tensor,
        pairs: Pairs,
        *,
        logits_only: bool,
    ) -> list[NativeOp]:
        return []

    def add_embedding(self, token_ids: torch.Tensor, out: torch.Tensor) -> list[NativeOp]:
        return []

    def replace_embeddings(self, token_ids: torch.Tensor, out: torch.Tensor) -> list[NativeOp]:
        return []

    def replace_logits(self, x: torch.Tensor, out: torch.Tensor) -> list[NativeOp]:
        return []

    def token_weights(self, module: str, norm: NormWeight, *, logits_only: bool) -> None:
        """No adapter replaces any."""


MAX_TOKENS, NUM_CELLS = 120, 400


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
        if path == "torch":
            weights = load_weights(folder, description, dtype, "cpu", Linear)
            return TorchDecoder(cache, transformer=Transformer(description, weights))
        library = native_library()
        packed = load_weights(folder, description, dtype, "cpu", PackedProjections())
        pages = BatchPages(MAX_TOKENS, NUM_CELLS // page_size)
        arrays = StepArrays(MAX_TOKENS, MAX_TOKENS, page_size, pages)
        workspace = Workspace.allocate(description, MAX_TOKENS, MAX_TOKENS, dtype)
        transformer = NativeTransformer(
            description, packed, cache, arrays, workspace, adapters or NoAdapters(), library
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
