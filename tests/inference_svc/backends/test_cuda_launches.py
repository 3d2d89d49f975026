"""How many kernels a recorded decode step launches, each some microseconds that nothing hides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inference_svc.backends.cuda import CudaBackend
from kernels.attention import triton_kernels as attention
from kernels.dispatch import interpreted
from kernels.elementwise import triton_kernels as elementwise
from kernels.lora import triton_kernels as lora
from tests.gpu.models import Model, make_geometry

NUM_LAYERS = 32
LIMITS = {False: 360, True: 620}
"""By whether rows have adapters."""
FREE = {"empty", "detach", "t", "view", "_unsafe_view", "slice", "split", "split_with_sizes"}
FREE |= {"empty_like", "flatten", "unflatten", "reshape", "alias", "select", "transpose"}
"""Operations of torch that launch nothing."""


class Launches(TorchDispatchMode):
    """Counts torch's operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in FREE:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class CountedKernel:
    """A Triton kernel that is launched and computes nothing."""

    def __init__(self, name: str, counts: Counter[str]) -> None:
        self._name, self._counts = name, counts

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*_: Any, **__: Any) -> None:
            self._counts[self._name] += 1

        return launch


@contextmanager
def counted_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts what is launched meanwhile; Triton's kernels compute nothing."""
    launches = Launches()
    for module in (attention, elementwise, lora):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, CountedKernel(name, launches.counts))
    with interpreted(), launches:
        yield launches.counts


@pytest.mark.parametrize("with_lora", LIMITS)
def test_a_decode_step_launches_few_kernels(tmp_path, monkeypatch, with_lora):
    geometry = make_geometry("llama", tmp_path, num_hidden_layers=NUM_LAYERS)
    model = Model.make(geometry, torch.float32, torch.device("cpu"))
    with counted_launches(monkeypatch) as counts:
        backend: CudaBackend = model.fixed(lambda compute: None)
        counts.clear()
        backend._decode(1, with_lora)
        counts = dict(counts)
    assert sum(counts.values()) <= LIMITS[with_lora], str(counts)
    assert counts["add_rms_norm_kernel"] == 2 * NUM_LAYERS + 1
    assert counts["swiglu_kernel"] == counts["store_kernel"] == NUM_LAYERS
    assert counts["rotary_angles_kernel"] == counts["argmax"] == 1
    assert ("shrink_kernel" in counts) == with_lora
