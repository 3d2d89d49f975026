"""The device's memory that steps are computed in, besides the arena: weights, pages, states, inputs
and results."""

from __future__ import annotations

import torch

from inference_svc.adapters.targets import AppliedTargets
from inference_svc.backends.adapter_memory import AdapterMemory
from inference_svc.backends.arena import Arena
from inference_svc.backends.base import Reload
from inference_svc.backends.cuda.exchange import BlockingExchange, DeviceExchange
from inference_svc.backends.cuda.steps import FixedSteps, StepLimits, StepResults
from inference_svc.backends.magnitudes import Magnitudes
from inference_svc.model.checkpoint.weights import ModelWeights
from inference_svc.model.description import Decoder
from inference_svc.model.kv_caches import KVCaches
from inference_svc.model.layers import TorchLinear
from inference_svc.model.recurrent_states import RecurrentStates
from inference_svc.model.sharding.pictures import takes_pictures
from inference_svc.model.transformer import Transformer


class CudaMemory(AdapterMemory):
    """The part of a `CudaBackend` that owns memory, and gives it back while a server sleeps.
    `exchange`: of a model that is cut."""

    def __init__(
        self,
        transformer: Transformer,
        kv_caches: KVCaches,
        arena: Arena,
        targets: AppliedTargets,
        limits: StepLimits,
        reload: Reload | None = None,
        states: RecurrentStates | None = None,
        exchange: DeviceExchange | None = None,
    ) -> None:
        super().__init__(arena)
        self._exchange = exchange
        self.num_states = 0 if states is None else states.num_states
        self.num_pages, self._page_size = kv_caches.num_pages - 1, kv_caches.page_size
        self._decoder, self._targets = transformer.description, targets
        self.transformer: Transformer | None = transformer
        self.kv_caches: KVCaches | None = kv_caches
        self.states = states
        self._reload = reload
        self.steps = FixedSteps(
            arena,
            targets,
            limits,
            self.num_pages,
            self._page_size,
            states,
            exchange,
            self._decoder.pictures,
            takes_pictures=takes_pictures(self._decoder),
        )
        self.pictures = None if reload is None else reload.pictures(arena)
        self.results = StepResults.allocate(self._decoder, targets, limits, arena.device)
        # Memory left by reading the weights goes back when steps are recorded.
        self._reserved_bytes = self._trimmed_bytes()

    @property
    def weights_bytes(self) -> int:
        of_tower = 0 if self.pictures is None else self.pictures.weights_bytes
        return of_tower + (0 if self.transformer is None else self.transformer.weights.num_bytes)

    @property
    def kv_bytes(self) -> int:
        return 0 if self.kv_caches is None else self.kv_caches.num_bytes

    @property
    def recurrent_bytes(self) -> int:
        return 0 if self.states is None else self.states.num_bytes

    @property
    def workspace_bytes(self) -> int:
        """The inputs, the logits, and the memory that torch has reserved on the device since the
        backend was made: it reuses memory that a step has freed, and recorded steps hold their
        workspace."""
        fixed_bytes = self.steps.num_bytes + self.results.num_bytes
        return fixed_bytes + _reserved_bytes(self.arena.device) - self._reserved_bytes

    def _make_magnitudes(self) -> Magnitudes:
        assert self.transformer is not None, "the weights are freed"
        weights, rank = self.transformer.weights, self._decoder.rank
        exchange = None if self._exchange is None else BlockingExchange(self._exchange)
        tower = None if self.pictures is None else self.pictures.weights
        has_stages = self._decoder.stage is not None
        return Magnitudes(weights, self.arena, rank, exchange, has_stages=has_stages, tower=tower)

    def free_unused(self) -> None:
        """Lets go of torch's cache: its pieces may be too small for an allocation that failed."""
        if self.arena.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def _held_bytes(self) -> int:
        of_pictures = 0 if self.pictures is None else self.pictures.num_bytes
        return self.kv_bytes + self.recurrent_bytes + self.weights_bytes + of_pictures

    def free_memory(self, *, weights: bool) -> int:
        held_bytes = self._held_bytes
        self.kv_caches = self.states = None
        if self.pictures is not None:
            self.pictures.free(weights=weights)
        if weights:
            self._magnitudes = None
            self.transformer = None
        self._reserved_bytes = self._trimmed_bytes()
        return held_bytes - self._held_bytes

    def _allocate_freed(self) -> None:
        """Allocates again the memory that is freed."""
        assert self._reload is not None
        if self.transformer is None:
            weights = self._reload.weights()
            self.transformer = made_transformer(
                self._decoder, weights, self._exchange, self._targets
            )
        self.kv_caches = self.kv_caches or self._reload.pages()
        self.states = self.states or self._reload.states()
        if self.pictures is not None:
            self.pictures.restore()
        self._reserved_bytes = self._trimmed_bytes()

    def _trimmed_bytes(self) -> int:
        """Gives back memory that torch has reserved and does not use; returns the bytes in use."""
        self.free_unused()
        return _reserved_bytes(self.arena.device)


def made_transformer(
    decoder: Decoder,
    weights: ModelWeights[TorchLinear],
    exchange: DeviceExchange | None,
    targets: AppliedTargets,
) -> Transformer:
    """Stages alone know of tokens that adapters may add, whether any of a step has."""
    num_added = 0 if decoder.stage is None else targets.max_added_tokens
    return Transformer(decoder, weights, exchange, num_added)


def _reserved_bytes(device: torch.device) -> int:
    """Returns the bytes that torch has reserved on the device; 0 on a CPU, where tests run this."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
