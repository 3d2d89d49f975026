"""LoRA of one group of projections over uncached memory, ours and the peers'.

Every call uses the next layer's weights, as in a step, so that they come from memory. All
implementations read the same memory, each in its own layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bench.gpu_run.cases.peers import LoraCall, Work
from bench.gpu_run.context import Context
from bench.gpu_run.model import MAX_RANK, read_description
from bench.gpu_run.timing import Times
from contract.images.targets import TargetKind
from inference_svc.adapters.targets import build_layout
from kernels.lora import GRANULE_BYTES, LoraGroup, LoraPlan, LoraTable, TableEntry
from kernels.lora.triton_ops import add_lora

CHECKED_TOKENS = 6
"""Number of tokens to compare with the definition, from the first to the last."""
MIN_CALLS = 4
STD = 0.02


class Group(NamedTuple):
    """Projections that read the same input."""

    name: str
    num_in: int
    widths: tuple[int, ...]


class Case(NamedTuple):
    """A number of rows of `row_tokens` tokens each, which share `num_adapters` adapters."""

    group: Group
    rank: int
    num_rows: int
    num_adapters: int
    row_tokens: int = 1

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.row_tokens

    @property
    def name(self) -> str:
        what = f"{self.num_rows} rows" if self.row_tokens == 1 else f"{self.num_tokens} tokens"
        return f"{self.group.name}, rank {self.rank}, {what}, {self.num_adapters} adapters"


def groups(context: Context) -> list[Group]:
    """Returns the model's groups, at most `sizes.max_groups`, the output head last."""
    layout = build_layout(read_description(context.sizes.config), "", context.sizes.dtype)
    found: dict[str, list[tuple[int, int]]] = {}
    for target in layout.targets:
        if target.kind is TargetKind.LINEAR and target.layer in (0, None):
            name = target.group.rpartition(".")[2]
            found.setdefault(name, []).append((target.in_features, target.out_features))
    return [
        Group(name, sizes[0][0], tuple(width for _, width in sizes))
        for name, sizes in [*found.items()][-context.sizes.max_groups :]
    ]


def cases(context: Context) -> Iterator[Case]:
    """Yields cases by rank, and for each rank decodes before prompts."""
    sizes = context.sizes
    all_groups = groups(context)
    for rank in sizes.ranks:
        for num_rows in sizes.kernel_rows:
            for num_adapters in sorted({1, -(-num_rows // 2), num_rows}):
                yield from (Case(group, rank, num_rows, num_adapters) for group in all_groups)
        for num_tokens in sizes.kernel_tokens:
            for num_rows in (1, 4):
                # The head computes only tokens to sample, never a whole prompt.
                for group in all_groups[:-1]:
                    yield Case(group, rank, num_rows, num_rows, num_tokens // num_rows)


class Pool:
    """Random memory for the weights of any one of `cases`; each uses it from the start."""

    def __init__(self, context: Context, cases: Iterable[Case]) -> None:
        self._sizes = context.sizes
        elements = max(self._num_layers(case) * self._layer_elements(case) for case in cases)
        self._flat = torch.empty(elements, dtype=context.sizes.dtype, device=context.device)
        self._flat.normal_(std=STD)

    def layers(self, case: Case) -> list[torch.Tensor]:
        """Returns the memory of each layer's weights, for as many layers as `sizes.case_bytes`
        holds."""
        elements = self._layer_elements(case)
        return list(self._flat[: self._num_layers(case) * elements].split(elements))

    def _layer_elements(self, case: Case) -> int:
        per_granule = GRANULE_BYTES // self._sizes.dtype.itemsize
        elements = sum(
            -(-case.rank * features // per_granule) * per_granule
            for width in case.group.widths
            for features in (case.group.num_in, width)
        )
        return elements * case.num_adapters

    def _num_layers(self, case: Case) -> int:
        most = self._sizes.max_calls
        num_bytes = self._layer_elements(case) * self._sizes.dtype.itemsize
        return max(min(MIN_CALLS, most), min(most, self._sizes.case_bytes // num_bytes))


def make_work(context: Context, case: Case, pool: Pool) -> Work:
    """Makes a case's work, with the same values every time."""
    slots = torch.arange(case.num_rows) * case.num_adapters // case.num_rows
    return Work(
        token_slots=slots.repeat_interleave(case.row_tokens),
        num_slots=case.num_adapters,
        rank=case.rank,
        widths=case.group.widths,
        x=random(context, case.num_tokens, case.group.num_in),
        out=random(context, case.num_tokens, sum(case.group.widths)),
        layers=pool.layers(case),
    )


def random(context: Context, *shape: int) -> torch.Tensor:
    """Returns random values, the same every time."""
    generator = torch.Generator(context.device).manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=context.sizes.dtype, device=context.device)


@dataclass
class Ours:
    """Our shrink and expand as a step launches them, with a table as wide as the model's."""

    work: Work
    row_tokens: int
    num_targets: int

    def __post_init__(self) -> None:
        work, arena = self.work, self.work.layers[0]
        self._table = LoraTable.create(
            work.num_slots, self.num_targets, arena, arena.device, max_rank=MAX_RANK
        )
        self._places: dict[tuple[int, int], TableEntry] = {}
        granule = 0
        for slot in range(work.num_slots):
            entries = []
            for part, width in enumerate(work.widths):
                a, b = granule, granule + self._granules(work.num_in)
                granule = b + self._granules(width)
                entries.append(TableEntry(1 + part, a, b, work.rank, work.num_in, width))
                self._places[slot, part] = entries[-1]
            self._table.set_row(slot, entries)
        slots = work.token_slots[:: self.row_tokens].tolist()
        lengths = [self.row_tokens] * len(slots)
        self._plan = LoraPlan.build(slots, lengths, self._table, arena.device)
        offsets = tuple(sum(work.widths[:part]) for part in range(len(work.widths)))
        targets = tuple(1 + part for part in range(len(work.widths)))
        self._group = LoraGroup(targets, work.num_in, offsets, work.widths)

    def _granules(self, features: int) -> int:
        return -(-self.work.rank * features * self.work.x.dtype.itemsize // GRANULE_BYTES)

    def run(self, layer: int) -> None:
        work = self.work
        add_lora(work.out, work.x, work.layers[layer], self._table, self._plan, self._group)

    def weights(self, layer: int, slot: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
        place, work = self._places[slot, part], self.work

        def matrix(granule: int, features: int) -> torch.Tensor:
            start = granule * GRANULE_BYTES // work.x.dtype.itemsize
            flat = work.layers[layer][start : start + work.rank * features]
            return flat.view(work.rank, features)

        return matrix(place.a_granule, work.num_in), matrix(place.b_granule, work.widths[part])


def num_targets(context: Context) -> int:
    decoder = read_description(context.sizes.config)
    return len(build_layout(decoder, "", context.sizes.dtype).targets)


def error(call: LoraCall, work: Work) -> float:
    """Returns the relative RMS error of the call's addition in layer 0 against the definition in
    fp64, over some tokens."""
    before = work.out.clone()
    work.out.zero_()  # or the rounding of the sum would hide the addition
    call.run(0)
    added = work.out.double()
    work.out.copy_(before)
    num_tokens = len(work.token_slots)
    chosen = sorted({num_tokens * index // CHECKED_TOKENS for index in range(CHECKED_TOKENS)})
    wanted = torch.cat([_definition(call, work, token) for token in chosen])
    difference = (added[chosen] - wanted).square().mean().sqrt()
    return float(difference / wanted.square().mean().sqrt())


def _definition(call: LoraCall, work: Work, token: int) -> torch.Tensor:
    """Returns the definition's result [1, sum of widths] in fp64."""
    x, slot = work.x[token].double(), int(work.token_slots[token])
    parts = []
    for part in range(len(work.widths)):
        a, b = call.weights(0, slot, part)
        parts.append((x @ a.double().T) @ b.double())
    return torch.cat(parts)[None]


def time_call(context: Context, call: LoraCall, work: Work, max_s: float = 0.05) -> Times:
    """Returns the times of one layer's call."""

    def run() -> None:
        for layer in range(len(work.layers)):
            call.run(layer)

    return context.timer.time_us(run, len(work.layers), max_s)


def bound_us(context: Context, case: Case) -> float:
    """Returns the minimum microseconds of a call: its bytes, each once, its products, and one node
    of a graph."""
    itemsize = context.sizes.dtype.itemsize
    num_in, num_out = case.group.num_in, sum(case.group.widths)
    per_adapter = case.rank * (num_in * len(case.group.widths) + num_out)
    elements = case.num_adapters * per_adapter + case.num_tokens * (num_in + 2 * num_out)
    flops = 2 * case.num_tokens * per_adapter
    return max(
        elements * itemsize / context.bytes_per_us,
        flops / context.flops_per_us,
        context.ceilings["graph_node_us"],
    )
