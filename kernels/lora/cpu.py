"""LoRA on the CPU: two products per segment and target, on views made at an adapter's first use.

A batch holds many small segments, so the cost is overhead. torch hands 16-bit products to oneDNN,
which spends some 15 us per call before it computes; torch's own matrix-vector product takes 3 us
for one row and sums in fp32. Short segments of 16-bit rows therefore go row by row through the
latter; fp32 products go to MKL, which has no such overhead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .plan import LoraGroup, LoraPlan
from .table import LoraTable, TargetWeights

MAX_SHORT_TOKENS = 5
"""16-bit segments up to here go row by row: the measured break-even against one oneDNN product."""


def add_lora(
    out: torch.Tensor, x: torch.Tensor, table: LoraTable, plan: LoraPlan, group: LoraGroup
) -> None:
    """See `reference.add_lora`. The shrunk rows are rounded to the model's dtype."""
    slices = [
        (target, out.narrow(1, offset, width))
        for target, offset, width in zip(
            group.targets, group.out_offsets, group.out_features, strict=True
        )
        if target in plan.targets
    ]
    max_short = _max_short_tokens(x)
    short = []
    for segment in plan.segments:
        start, end, slot = segment
        weights = table.weights(slot)
        present = [(weights[target], part) for target, part in slices if target in weights]
        if not present:
            continue
        if end - start <= max_short:
            short.append((segment, present))
            continue
        rows = x[start:end]
        for w, part in present:
            part[start:end].addmm_(rows.mm(w.a_t), w.b, alpha=w.scale)
    if not short:
        return
    with _own_products():
        for (start, end, _), present in short:
            for t in range(start, end):
                row = x[t]
                for w, part in present:
                    part[t].addmv_(w.b_t, w.a.mv(row), alpha=w.scale)


def add_lora_embedding(
    out: torch.Tensor, token_ids: torch.Tensor, table: LoraTable, plan: LoraPlan, target: int
) -> None:
    """See `reference.add_lora_embedding`."""
    max_short = _max_short_tokens(out)
    for start, end, slot in plan.segments:
        w: TargetWeights | None = table.weights(slot).get(target)
        if w is None:
            continue
        y = w.a.index_select(0, token_ids[start:end])  # [n, rank]
        if end - start > max_short:
            out[start:end].addmm_(y, w.b, alpha=w.scale)
            continue
        with _own_products():
            for t in range(start, end):
                out[t].addmv_(w.b_t, y[t - start], alpha=w.scale)


def _max_short_tokens(x: torch.Tensor) -> int:
    return 0 if x.dtype == torch.float32 else MAX_SHORT_TOKENS


@contextmanager
def _own_products() -> Iterator[None]:
    """Keeps torch from handing products to oneDNN. The switch is the process's: other threads that
    multiply meanwhile are right, only slower."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before
