"""The peers' LoRA kernels, from the files in the pack.

A peer's file imports a few names from its original project. This module makes modules with these
names: packages whose folder is the pack's, and the few functions that are used.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

import torch
import triton
import triton.language as tl

from bench.gpu_run.context import Missing
from bench.gpu_run.pack.store import PEERS, read_manifest

Config = Mapping[str, int]
"""Constants of one kernel."""


class LoraCall(Protocol):
    """LoRA of one group of projections, which adds to `out` with the weights of a given layer."""

    def run(self, layer: int) -> None: ...

    def weights(self, layer: int, slot: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns A [rank, in] and B [rank, out] of an adapter for the group's target `part`."""


@dataclass(frozen=True)
class Work:
    """Inputs and outputs: `token_slots` int64 [T] on the host, an adapter for each token; x [T, in]
    and out [T, sum of widths]; `layers` has flat memory for each layer's weights."""

    token_slots: torch.Tensor
    num_slots: int
    rank: int
    widths: tuple[int, ...]
    x: torch.Tensor
    out: torch.Tensor
    layers: Sequence[torch.Tensor]

    @property
    def num_in(self) -> int:
        return self.x.shape[1]


def load(pack: Path, name: str) -> ModuleType:
    """Imports a peer: `vllm` or `sglang`. Raises Missing where the pack lacks it."""
    why = read_manifest(pack)["missing"].get(name, "it was made without peers")
    folder = pack / PEERS / name
    if not folder.is_dir():
        raise Missing(f"{name} is not in the pack: {why}")
    _shim(name, folder)
    return importlib.import_module(MODULES[name])


MODULES = {
    "vllm": "vllm.lora.ops.triton_ops.lora_shrink_op",
    "sglang": "sglang.srt.lora.triton_ops.chunked_sgmv_shrink",
}


def _shim(name: str, folder: Path) -> None:
    """Adds modules for all imports of the peer's files to `sys.modules`."""
    modules = {"vllm": _vllm_modules, "sglang": _sglang_modules}[name]()
    parent, _, _ = MODULES[name].rpartition(".")
    parts = parent.split(".")
    for count in range(1, len(parts) + 1):
        modules.setdefault(".".join(parts[:count]), {})
    for path, names in modules.items():
        module = ModuleType(path)
        vars(module).update(names)
        module.__path__ = [str(folder.resolve())] if path == parent else []
        sys.modules[path] = module


def _vllm_modules() -> dict[str, dict[str, Any]]:
    def refuse_custom_op(**facts: Any) -> None:
        raise AttributeError("there are no custom operations, only the plain functions")

    def to_device(values: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    def ignore(*arguments: Any) -> None:
        """Replaces a logger's methods."""

    quiet = SimpleNamespace(warning_once=ignore, info_once=ignore, debug_once=ignore)
    is_cuda = torch.cuda.is_available()
    platform = SimpleNamespace(
        is_cuda=lambda: is_cuda,
        has_device_capability=lambda number: (
            is_cuda and torch.cuda.get_device_capability() >= divmod(number, 10)
        ),
    )
    return {
        "vllm": {
            "envs": SimpleNamespace(
                VLLM_BATCH_INVARIANT=False,
                VLLM_TUNED_CONFIG_FOLDER=None,
                VLLM_LORA_DISABLE_PDL=False,
                VLLM_LORA_ENABLE_DUAL_STREAM=False,
            )
        },
        "vllm.logger": {"init_logger": lambda name: quiet},
        "vllm.platforms": {"current_platform": platform},
        "vllm.utils": {},
        "vllm.utils.math_utils": {"next_power_of_2": triton.next_power_of_2},
        "vllm.utils.torch_utils": {
            "async_tensor_h2d": to_device,
            "direct_register_custom_op": refuse_custom_op,
        },
        "vllm.triton_utils": {"tl": tl, "triton": triton},
    }


def _sglang_modules() -> dict[str, dict[str, Any]]:
    def keep(key: Callable[..., Any]) -> Callable[[Any], Any]:
        return lambda kernel: kernel  # the original saves only the host's time

    return {
        "sglang.srt.lora.utils": {"LoRABatchInfo": SimpleNamespace},
        "sglang.srt.utils": {"cached_triton_kernel": keep},
    }


class Vllm:
    """vLLM's shrink and expand. A is [slots, 1, rank, in] and B [slots, 1, out, rank] per target.

    `configs` has the constants of "shrink" and "expand", in the form of vLLM's tuning files.
    """

    def __init__(self, pack: Path, work: Work, configs: Mapping[str, Config]) -> None:
        self._shrink_op: Any = load(pack, "vllm")
        folder = "vllm.lora.ops.triton_ops"
        self._expand_op: Any = importlib.import_module(f"{folder}.lora_expand_op")
        utils: Any = importlib.import_module(f"{folder}.utils")
        metadata: Any = importlib.import_module(f"{folder}.lora_kernel_metadata")
        self._work, self.configs = work, configs
        # vLLM caches weights by their address, which may have held other weights before.
        utils._LORA_A_PTR_DICT.clear()
        utils._LORA_B_PTR_DICT.clear()
        num_tokens = len(work.token_slots)
        meta = metadata.LoRAKernelMeta.make(work.num_slots, num_tokens, work.x.device)
        meta.prepare_tensors(work.token_slots.to(work.x.device))
        self._args = meta.meta_args(num_tokens, True)
        shape = (len(work.widths), num_tokens, work.rank)
        self._y = torch.empty(shape, dtype=torch.float32, device=work.x.device)
        self._layers = [self._stack(flat) for flat in work.layers]

    def _stack(self, flat: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        work, start = self._work, 0
        a: list[torch.Tensor] = []
        b: list[torch.Tensor] = []
        for width in work.widths:
            for tensors, shape in (
                (a, (work.num_slots, 1, work.rank, work.num_in)),
                (b, (work.num_slots, 1, width, work.rank)),
            ):
                size = shape[0] * shape[2] * shape[3]
                tensors.append(flat[start : start + size].view(shape))
                start += size
        return a, b

    def run(self, layer: int) -> None:
        a, b = self._layers[layer]
        find = self._find_config
        self._shrink_op.get_lora_op_configs = self._expand_op.get_lora_op_configs = find
        self._shrink_op._lora_shrink(self._work.x, a, self._y, *self._args, 1.0)
        self._expand_op._lora_expand(
            self._y, b, self._work.out, *self._args, offset_start=0, add_inputs=True
        )

    def _find_config(self, op_type: str, **facts: Any) -> Config:
        return self.configs[op_type]

    def weights(self, layer: int, slot: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = self._layers[layer]
        return a[part][slot, 0], b[part][slot, 0].T


class Sglang:
    """SGLang's chunked kernels, which its backend csgmv launches.

    A is [slots, targets * rank, in], B [slots, sum of widths, rank]. `configs` has constants of
    "shrink" and "expand", and of "both" ("chunk", the tokens of a program).
    """

    def __init__(self, pack: Path, work: Work, configs: Mapping[str, Config]) -> None:
        module: Any = load(pack, "sglang")
        self._shrink = module._chunked_lora_shrink_kernel
        expand: Any = importlib.import_module("sglang.srt.lora.triton_ops.chunked_sgmv_expand")
        self._expand = expand._chunked_lora_expand_kernel
        self._work, self.configs = work, configs
        device, num_parts = work.x.device, len(work.widths)
        self._ranks = torch.full((work.num_slots,), work.rank, dtype=torch.int32, device=device)
        self._scalings = torch.ones(work.num_slots, device=device)
        ends = torch.tensor([0, *work.widths]).cumsum(0)
        self._offsets = ends.to(torch.int32).to(device)
        self._segment(configs["both"]["chunk"])
        self._layers = []
        for flat in work.layers:
            a_shape = (work.num_slots, num_parts * work.rank, work.num_in)
            b_shape = (work.num_slots, sum(work.widths), work.rank)
            split = a_shape[0] * a_shape[1] * a_shape[2]
            end = split + b_shape[0] * b_shape[1] * b_shape[2]
            self._layers.append((flat[:split].view(a_shape), flat[split:end].view(b_shape)))

    def _segment(self, chunk: int) -> None:
        """Groups the tokens by adapter, at most `chunk` to a segment, as its backend does."""
        slots, order = self._work.token_slots.sort(stable=True)
        found, counts = slots.unique_consecutive(return_counts=True)
        indices, lengths = [], []
        for slot, count in zip(found.tolist(), counts.tolist(), strict=True):
            for first in range(0, count, chunk):
                indices.append(slot)
                lengths.append(min(chunk, count - first))
        device = self._work.x.device
        self._chunk, self._num_segments = chunk, len(indices)
        self._indices = torch.tensor(indices, dtype=torch.int32, device=device)
        starts = torch.tensor([0, *lengths]).cumsum(0)
        self._starts = starts.to(torch.int32).to(device)
        self._order = order.to(torch.int32).to(device)

    def run(self, layer: int) -> None:
        work, (a, b) = self._work, self._layers[layer]
        num_parts = len(work.widths)
        y = torch.empty(
            len(work.x), num_parts * work.rank, dtype=work.x.dtype, device=work.x.device
        )
        common: dict[str, Any] = {
            "seg_indptr": self._starts,
            "weight_indices": self._indices,
            "lora_ranks": self._ranks,
            "permutation": self._order,
            "num_segs": self._num_segments,
            "NUM_SLICES": num_parts,
            "BLOCK_M": self._chunk,
        }
        config: Any = self.configs["shrink"]
        self._shrink[triton.cdiv(a.shape[1], config["BLOCK_N"]), self._num_segments](
            x=work.x, weights=a, output=y, N=a.shape[1], K=work.num_in, **common, **config
        )
        config = self.configs["expand"]
        blocks = triton.cdiv(max(work.widths), config["BLOCK_N"])
        self._expand[blocks, num_parts, self._num_segments](
            x=y,
            weights=b,
            output=work.out,
            scalings=self._scalings,
            slice_offsets=self._offsets,
            OUTPUT_DIM=b.shape[1],
            MAX_RANK=work.rank,
            **common,
            **config,
        )

    def weights(self, layer: int, slot: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = self._layers[layer]
        rank, start = self._work.rank, sum(self._work.widths[:part])
        rows = slice(start, start + self._work.widths[part])
        return a[slot, part * rank : (part + 1) * rank], b[slot, rows].T


def default_chunk(num_tokens: int) -> int:
    """Returns the tokens of a program, chosen as in SGLang's backend."""
    return 128 if num_tokens >= 256 else 32 if num_tokens >= 64 else 16
