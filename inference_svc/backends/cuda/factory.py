"""Describes the backend of CUDA devices before anything is allocated, and makes it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.targets import applied_targets
from inference_svc.backends.adapter_memory import allocate_arena
from inference_svc.backends.base import (
    Backend,
    DeviceMemory,
    MemoryNeeds,
    RankBackend,
    make_reload,
    max_pages,
)
from inference_svc.backends.cuda.backend import CudaBackend, PreparedStep
from inference_svc.backends.cuda.exchange import START_S, DeviceExchange, DeviceMeeting
from inference_svc.backends.cuda.graphs import CudaRecorder, Record
from inference_svc.backends.cuda.memory import made_transformer
from inference_svc.backends.cuda.needs import memory_needs
from inference_svc.backends.cuda.rank import CudaRank
from inference_svc.backends.cuda.steps import StepLimits
from inference_svc.backends.exchange import LOCAL, Meeting
from inference_svc.backends.speed_notes import device_notes
from inference_svc.core import EngineConfig
from inference_svc.errors import DeviceFull
from inference_svc.host.device_faults import is_out_of_memory
from inference_svc.model.config.keys import names
from inference_svc.model.description import Decoder
from inference_svc.model.encoder.in_torch import OF_PICTURES
from inference_svc.model.layers import TorchProjections
from inference_svc.model.sharding.exchange import Exchange
from inference_svc.model.transformer import COMPUTED, OF_RANKS, OF_STAGES
from kernels import tuning
from kernels.host_memory import HostRegistrar
from kernels.quantised import WeightFormat, implementation

logger = logging.getLogger(__name__)

FLOAT8_CAPABILITY = (8, 9)
"""The first compute capability whose processors convert float8."""
LACKING = names("attention.head_dim>512 weight_format.odd_groups")


class CudaFactory:
    """A `BackendFactory` for a CUDA device, or of ranks that have one each."""

    name = "CUDA"
    features = (COMPUTED | OF_RANKS | OF_STAGES | OF_PICTURES) - LACKING
    disabled_by = "--device cpu"
    has_device_memory = True
    profiler_device = "cuda"

    def supports(self, config: EngineConfig) -> bool:
        is_ours = torch.device(config.device).type == "cuda"
        if is_ours and config.adapter_dtype == "fp8":
            device = config.device
            check_float8(
                torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
            )
        return is_ours

    def host_registrar(self, config: EngineConfig) -> HostRegistrar | None:
        device = torch.device(config.device)
        if device.type != "cuda":  # emulated
            return None
        return HostRegistrar(partial(torch.cuda.device, device))

    def speed_notes(self, config: EngineConfig, num_threads: int) -> list[str]:
        name = torch.cuda.get_device_name(config.device)
        capability = torch.cuda.get_device_capability(config.device)
        return device_notes(name, capability, tuning.measured_devices())

    def weight_kernels(self, form: WeightFormat) -> str:
        return implementation(form, "cuda")

    def memory_needs(self, config: EngineConfig, decoder: Decoder) -> MemoryNeeds:
        return memory_needs(config, decoder)

    def device_memory(self, config: EngineConfig) -> DeviceMemory | None:
        return DeviceMemory(*torch.cuda.mem_get_info(torch.device(config.device)))

    @property
    def instructions(self) -> str:
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        return f"{name} {'.'.join(map(str, capability))}, CUDA {torch.version.cuda}"

    def open_meeting(
        self, count: int, num_threads: int, timeout_s: float, num_stages: int = 1, address: str = ""
    ) -> Meeting:
        return DeviceMeeting(count, timeout_s, address or LOCAL, num_stages)

    def make_recorder(self, wait: Callable[[], None] | None) -> Record:
        """Returns what records steps; see `CudaRecorder`."""
        return CudaRecorder(wait)

    def build(
        self,
        config: EngineConfig,
        decoder: Decoder,
        layout: ModelLayout,
    ) -> Backend[PreparedStep]:
        """See BackendFactory.build. Raises also DeviceFull."""
        return self._built(config, decoder, layout, None)

    def build_rank(
        self, config: EngineConfig, decoder: Decoder, layout: ModelLayout, exchange: Exchange
    ) -> RankBackend[PreparedStep]:
        assert isinstance(exchange, DeviceExchange), "of this factory's meeting"
        check_devices([torch.cuda.get_device_name(each) for each in range(len(config.local_ranks))])
        made = self._built(config, decoder, layout, exchange)
        assert isinstance(made, CudaRank)
        return made

    def _built(
        self,
        config: EngineConfig,
        decoder: Decoder,
        layout: ModelLayout,
        exchange: DeviceExchange | None,
    ) -> CudaBackend:
        device_name = torch.cuda.get_device_name(torch.device(config.device))
        table = "its own" if tuning.use_device(device_name) else "the default"
        logger.info("kernels on %s: %s constants", device_name, table)
        try:
            backend = self._allocate(config, decoder, layout, exchange)
            backend.warm_up()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise DeviceFull(
                "the device has too little memory for the planned use: lower --kv-memory, or set "
                f"memory-limit ({error})"
            ) from error
        return backend

    def _allocate(
        self,
        config: EngineConfig,
        decoder: Decoder,
        layout: ModelLayout,
        exchange: DeviceExchange | None,
    ) -> CudaBackend:
        """Makes the backend, before its warm-up."""
        # Of torch's attention, towers use the kernels that have no plan to make for each new shape.
        torch.backends.cuda.enable_cudnn_sdp(False)
        reload = make_reload(config, decoder, TorchProjections)
        kv_caches = reload.pages()
        arena = allocate_arena(config, layout)
        weights = reload.weights()
        limits = StepLimits(config.max_batch_tokens, config.max_sequences, max_pages(config))
        targets = applied_targets(layout, config.lora_targets, config.max_added_tokens)
        transformer = made_transformer(decoder, weights, exchange, targets)
        kind, wait = CudaBackend, None
        if exchange is not None:
            kind, wait = CudaRank, partial(exchange.wait, START_S)
        record = self.make_recorder(wait) if config.record_steps else None
        return kind(
            transformer,
            kv_caches,
            arena,
            targets,
            limits,
            record,
            reload,
            reload.states(),
            exchange,
        )


def check_devices(names: Sequence[str]) -> None:
    """Raises ValueError if ranks have devices of several kinds: each chooses the experts of a token
    itself, and they must be equal."""
    if len({*names}) > 1:
        raise ValueError(
            f"the devices of {len(names)} processes differ: {', '.join(names)}; choose equal ones "
            "with CUDA_VISIBLE_DEVICES"
        )


def check_float8(name: str, capability: tuple[int, int]) -> None:
    """Raises ValueError if a device of this name and compute capability does not convert float8."""
    if capability < FLOAT8_CAPABILITY:
        needed, found = (".".join(map(str, each)) for each in (FLOAT8_CAPABILITY, capability))
        raise ValueError(
            f"--adapter-dtype fp8 needs compute capability {needed} or later, and {name} has "
            f"{found}: leave it out"
        )
