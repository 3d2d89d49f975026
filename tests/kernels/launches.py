"""What a step of a model's shape launches, compiled for a GPU without one, as worker.py runs it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton

from kernels.attention import AttentionPlan, HeadNorms, KVCache
from kernels.attention import triton_kernels as attention
from kernels.attention import triton_ops as attention_ops
from kernels.elementwise import triton_kernels as elementwise
from kernels.elementwise import triton_ops as elementwise_ops
from kernels.elementwise.addend import Addend
from kernels.experts import Choice
from kernels.experts import triton_kernels as experts
from kernels.experts import triton_ops as experts_ops
from kernels.lora import (
    LoraGroup,
    LoraPlan,
    LoraTable,
    OutputVectors,
    ReplacedWeight,
    TableEntry,
    TableRow,
)
from kernels.lora import triton_kernels as lora
from kernels.lora import triton_ops as lora_ops
from kernels.lora.rows import NO_VECTORS
from kernels.lora.table import MixPart
from kernels.quantised import Codes, QuantisedWeight, WeightFormat
from kernels.quantised import triton_kernels as quantised
from kernels.quantised import triton_ops as quantised_ops
from kernels.recurrence import DeltaHeads, DeviceSegments, Segments
from kernels.recurrence import triton_kernels as recurrence
from kernels.recurrence import triton_ops as recurrence_ops
from kernels.replaced import triton_kernels as replaced
from kernels.replaced import triton_ops as replaced_ops
from tests.support.kernels.worker import CompileOnly, NoDevice

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MODULES: tuple[ModuleType, ...] = (
    attention,
    elementwise,
    experts,
    lora,
    quantised,
    recurrence,
    replaced,
)
DTYPE, PAGE_SIZE, MAX_RANK, NUM_TARGETS = torch.bfloat16, 16, 64, 226
SM_THREADS, SM_REGISTERS, SM_SHARED_BYTES, SM_CTAS = 2048, 1 << 16, 228 << 10, 32
"""Limits of an SM of compute capability 9.0: CUDA C++ Programming Guide, table of technical
specifications."""
CTA_SHARED_BYTES = 1 << 10
"""Shared memory that the system takes for each CTA."""


class Shape(NamedTuple):
    """One layer of a model, or of a slice of it."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def groups(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Inputs and outputs of the projections with adapters."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "qkv": (self.hidden, (q, kv, kv)),
            "o": (q, (self.hidden,)),
            "gate_up": (self.hidden, (self.intermediate, self.intermediate)),
            "down": (self.intermediate, (self.hidden,)),
        }


class Compiled(NamedTuple):
    """What became of one launch. `num_ctas` fit an SM at once."""

    registers: int
    stack_bytes: int
    num_ctas: int
    spills: int
    """Loads and stores of local memory."""
    wide_loads: int
    """Loads of 16 bytes, to registers or to shared memory."""
    wide_copies: int
    """Copies of 8 or 16 bytes to shared memory, which the program does not wait for."""
    narrow_loads: int
    """Loads of 2 bytes: elements, one by one."""
    wgmma: int
    mma: int


def compiled_step(shape: Shape, rows: list[tuple[int, int]]) -> dict[str, dict[str, int]]:
    """Every launch of a step of `rows` (first position, queries) of one layer, by kernel and, for
    adapters, group: the fields of `Compiled`, as a process passes them on."""
    launched = launch_step(Shape(*shape), rows)
    return {name: describe(each)._asdict() for name, each in launched.items()}


def launch_step(shape: Shape, rows: list[tuple[int, int]]) -> dict[str, Any]:
    from triton.runtime import driver

    driver.set_active(NoDevice(90))
    found: dict[str, Any] = {}
    with recorded() as launched:
        _launch_layer(shape, rows)
        found |= dict(launched())
        found |= _launch_norms(shape, launched)
        for group, (num_in, num_out) in shape.groups.items():
            _launch_lora(num_in, num_out, [count for _, count in rows])
            found |= {f"{name} {group}": each for name, each in launched()}
    return found


@contextmanager
def recorded() -> Iterator[Callable[[], list[tuple[str, Any]]]]:
    """Launches only compile; the function returns what was launched since its last call."""
    places = [(m, n, k) for m in MODULES for n, k in vars(m).items() if n.endswith("_kernel")]
    launches = {name: CompileOnly(kernel) for _, name, kernel in places}

    def launched() -> list[tuple[str, Any]]:
        found = [(name, each) for name, launch in launches.items() for each in launch.compiled]
        for launch in launches.values():
            launch.compiled = []
        return found

    for module, name, _ in places:
        setattr(module, name, launches[name])
    try:
        yield launched
    finally:
        for module, name, kernel in places:
            setattr(module, name, kernel)


def compiled_attention(
    shape: Shape, rows: list[tuple[int, int]], dtype: torch.dtype
) -> dict[str, dict[str, int]]:
    """As `compiled_step`, of what surrounds attention in models of another dtype."""
    from triton.runtime import driver

    driver.set_active(NoDevice(90))
    with recorded() as launched:
        _launch_layer(Shape(*shape), rows, dtype)
        return {name: describe(each)._asdict() for name, each in launched()}


def compiled_beside(shape: Shape, rows: list[tuple[int, int]]) -> dict[str, dict[str, int]]:
    """As `compiled_step`, of adapters beside the base's products, and of the kernels that add what
    they make."""
    from triton.runtime import driver

    driver.set_active(NoDevice(90))
    shape, found = Shape(*shape), {}
    slots = torch.zeros(sum(count for _, count in rows), dtype=torch.int32)
    with recorded() as launched:
        _launch_layer(shape, rows, slots=slots)
        found |= {n: each for n, each in launched() if n in ("store_kernel", "swiglu_kernel")}
        found |= _launch_norms(shape, launched, slots)
        for group, (num_in, num_out) in shape.groups.items():
            _launch_lora(num_in, num_out, [count for _, count in rows], "beside")
            found |= {f"{name} {group}": each for name, each in launched()}
    return {name: describe(each)._asdict() for name, each in found.items()}


def compiled_families(shape: Shape, rows: list[tuple[int, int]]) -> dict[str, dict[str, int]]:
    """As `compiled_step`, of what some families compute otherwise, by the kernel and that."""
    from triton.runtime import driver

    driver.set_active(NoDevice(90))
    shape, found = Shape(*shape), {}
    dim, num_heads, num_kv_heads = shape.head_dim, shape.num_heads, shape.num_kv_heads
    cache = KVCache.allocate(
        num_layers=1, num_pages=4, page_size=PAGE_SIZE, num_kv_heads=num_kv_heads, head_dim=dim,
        dtype=DTYPE,
    )  # fmt: skip
    pages = [[0] * (1 + (first + count) // PAGE_SIZE) for first, count in rows]
    plan = AttentionPlan.build(*zip(*rows, strict=True), pages, PAGE_SIZE)
    num_tokens, width = len(plan.cells), num_heads * dim
    qkv = torch.zeros(num_tokens, width + 2 * num_kv_heads * dim, dtype=DTYPE)
    queries = qkv[:, :width].view(num_tokens, num_heads, dim)
    hidden = torch.zeros(num_tokens, shape.hidden, dtype=DTYPE)
    of_head, of_all = torch.zeros(dim), (torch.zeros(width), torch.zeros(num_kv_heads * dim))
    angles = torch.zeros(num_tokens, 1, dim, dtype=DTYPE)
    part = torch.zeros(num_tokens, 1, dim // 2, dtype=DTYPE)
    gate_up = torch.zeros(num_tokens, 2 * shape.intermediate, dtype=DTYPE)

    def store(cos: torch.Tensor | None, sides: int = 2, **options: Any) -> None:
        norms = HeadNorms(
            eps=1e-5, **{k: options.pop(k) for k in HeadNorms._fields if k in options}
        )
        attention_ops.rotate_and_store(
            *(qkv[:, : width + sides * num_kv_heads * dim], cache, 0, plan.cells, cos, cos, norms),
            num_heads=num_heads,
            **options,
        )

    variants: dict[str, Callable[[], Any]] = {
        "soft-capped": lambda: attention_ops.attend(
            queries, cache, 0, plan, scale=0.1, softcap=50.0
        ),
        "with sinks": lambda: attention_ops.attend(
            queries, cache, 0, plan, scale=0.1, sinks=torch.zeros(num_heads)
        ),
        "a part turned, neighbours": lambda: store(part, is_interleaved=True),
        "norms rotated": lambda: store(angles, q=of_head, k=of_head, are_rotated=True),
        "a norm of all queries": lambda: store(angles, q=of_all[0]),
        "a norm of all keys": lambda: store(angles, k=of_all[1]),
        "values are keys": lambda: store(angles, 1, q=of_head, k=of_head, v=of_head),
        "keys of another layer": lambda: store(angles, 0, q=of_head),
        "nothing turned, growing": lambda: store(None, q_scale=torch.zeros(num_tokens)),
        "centred, scaled": lambda: elementwise_ops.add_rms_norm(
            *(hidden, hidden, torch.zeros(shape.hidden), 1e-5),
            delta_scale=0.2,
            sum_scale=0.3,
            is_centred=True,
        ),
        "geglu": lambda: elementwise_ops.geglu(*gate_up.chunk(2, dim=1)),
        "clamped": lambda: elementwise_ops.clamped_swiglu(*gate_up.chunk(2, dim=1), 1.7, 7.0),
    }
    with recorded() as launched:
        for label, launch in variants.items():
            launch()
            found |= {f"{name} {label}": describe(each)._asdict() for name, each in launched()}
    return found


def compiled_recurrence(
    heads: DeltaHeads, row_lengths: list[int], dtype: torch.dtype
) -> dict[str, dict[str, int]]:
    """As `compiled_step`, of a gated delta net and of attention's gate."""
    from triton.runtime import driver

    driver.set_active(NoDevice(90))
    with recorded() as launched:
        launch_recurrence(heads, row_lengths, dtype)
        return {name: describe(each)._asdict() for name, each in launched()}


def launch_recurrence(heads: DeltaHeads, row_lengths: list[int], dtype: torch.dtype) -> None:
    """Launches a gated delta net and attention's gate, of rows of one segment each."""
    num_keys, num_values, key_size, value_size = heads = DeltaHeads(*heads)
    num_tokens, values = sum(row_lengths), num_values * value_size
    channels = 2 * num_keys * key_size + values
    rows = [[(0, 1 + row, count)] for row, count in enumerate(row_lengths)]
    segments = Segments((), (), (), DeviceSegments.build(rows, "cpu"))
    made = torch.zeros(num_tokens, channels + values + 2 * num_values, dtype=dtype)
    x, z, b, a = made.split((channels, values, num_values, num_values), dim=1)
    inputs, states = torch.zeros(1, 3, channels), torch.zeros(1, num_values, key_size, value_size)
    mixed = recurrence_ops.causal_conv(x, torch.zeros(channels, 4), inputs, segments)
    of_heads = torch.zeros(num_values)
    mixed = recurrence_ops.delta_rule(mixed, b, a, of_heads, of_heads, states, segments, heads)
    by_head = mixed.view(num_tokens, num_values, value_size)
    for weight in (torch.zeros(value_size, dtype=dtype), by_head[:, 0].contiguous()):
        recurrence_ops.gated_norm(by_head, z.unflatten(1, (num_values, -1)), weight, 1e-6)
    recurrence_ops.gate_heads(mixed, mixed)


class Mixture(NamedTuple):
    """Experts of one layer, of which each token has some."""

    num_experts: int
    num_chosen: int
    hidden: int
    intermediate: int


def compiled_experts(
    mixture: Mixture, num_tokens: int, dtype: torch.dtype
) -> dict[str, dict[str, int]]:
    """As `compiled_step`, of a mixture in a step of a prompt with adapters, by kernel and, of
    products, which of the two."""
    from triton.runtime import driver

    driver.set_active(NoDevice(90))
    num_experts, num_chosen, hidden, intermediate = Mixture(*mixture)
    logits, bias = torch.zeros(num_tokens, num_experts), torch.zeros(num_experts)
    table = LoraTable.create(4, 1, torch.zeros(1024, dtype=dtype), "cpu", max_rank=MAX_RANK)
    plan = LoraPlan.build([0], [num_tokens], table, "cpu")
    found: dict[str, Any] = {}
    with recorded() as launched:
        order = lora_ops.order_tokens(plan)
        routing = experts_ops.route(logits, Choice(num_chosen), bias, bias)
        pairs = experts_ops.sort_pairs(routing.experts, num_experts, order.tokens)
        lora_ops.plan_pairs(plan, order, routing.experts, pairs)
        num_pairs = len(pairs.tokens)
        x = torch.zeros(num_pairs, hidden, dtype=dtype)
        experts_ops.combine(x, pairs, routing.weights, x[:num_tokens], logits[:, :1].contiguous())
        found |= dict(launched())
        for name, sizes, rows in (
            ("gate_up", (hidden, 2 * intermediate), pairs.tokens),
            ("down", (intermediate, hidden), None),
        ):
            num_in, num_out = sizes
            # Nothing runs: memory that nobody touches is none.
            weight = torch.empty_strided(
                (num_experts, num_out, num_in), (num_out * num_in, num_in, 1), dtype=dtype
            )
            x = torch.zeros(num_tokens if rows is not None else num_pairs, num_in, dtype=dtype)
            own_bias = torch.zeros(num_experts, num_out, dtype=dtype)
            experts_ops.experts_linear(x, weight, pairs, own_bias, rows)
            found |= {f"{kernel} {name}": each for kernel, each in launched()}
    return {name: describe(each)._asdict() for name, each in found.items()}


def compiled_quantised(
    codes: str, group_size: int, has_offsets: bool, scales: str, num_rows: int, dtype: torch.dtype
) -> dict[str, dict[str, int]]:
    """As `compiled_step`, of products with weights in a format: of an 8B model's narrowest and
    widest outputs, and of eight experts."""
    from triton.runtime import driver

    driver.set_active(NoDevice(90))
    form = WeightFormat(Codes(codes), group_size, has_offsets, scales)
    found: dict[str, Any] = {}
    with recorded() as launched:
        for num_out in (4096, 28672):
            weight = _empty_weight(form, num_out, 4096)
            quantised_ops.linear(torch.zeros(num_rows, 4096, dtype=dtype), weight)
            found |= {f"{name} {num_out} outputs": each for name, each in launched()}
        weight = _empty_weight(form, 8 * 1536, 2048)
        pairs = experts_ops.sort_pairs(torch.zeros(num_rows, 1, dtype=torch.int32), 8)
        launched()
        x = torch.zeros(num_rows, 2048, dtype=dtype)
        quantised_ops.experts_linear(x, weight, pairs, None, 1536, 1536)
        found |= {f"{name} of experts": each for name, each in launched()}
    return {name: describe(each)._asdict() for name, each in found.items()}


def _empty_weight(form: WeightFormat, num_out: int, num_in: int) -> QuantisedWeight:
    return QuantisedWeight.empty(form, num_out, num_in, torch.device("cpu"))


def _launch_layer(
    shape: Shape,
    rows: list[tuple[int, int]],
    dtype: torch.dtype = DTYPE,
    slots: torch.Tensor | None = None,
) -> None:
    """With `slots`, projections have addends."""

    def addend(values: torch.Tensor) -> Addend | None:
        return None if slots is None else Addend(values.clone(), slots)

    dim, num_heads, num_kv_heads = shape.head_dim, shape.num_heads, shape.num_kv_heads
    cache = KVCache.allocate(
        num_layers=1, num_pages=4, page_size=PAGE_SIZE, num_kv_heads=num_kv_heads, head_dim=dim,
        dtype=dtype,
    )  # fmt: skip
    pages = [[0] * (1 + (first + count) // PAGE_SIZE) for first, count in rows]
    plan = AttentionPlan.build(*zip(*rows, strict=True), pages, PAGE_SIZE)
    num_tokens = len(plan.cells)
    gate_up = torch.zeros(num_tokens, 2 * shape.intermediate, dtype=dtype)
    elementwise_ops.swiglu(*gate_up.chunk(2, dim=1), addend(gate_up))
    angles = attention_ops.rotary_angles(plan.cells, torch.zeros(dim // 2), 1.0, dtype)
    qkv = torch.zeros(num_tokens, (num_heads + 2 * num_kv_heads) * dim, dtype=dtype)
    norm = torch.zeros(dim, dtype=dtype)
    norms = HeadNorms(norm, norm, eps=1e-5)
    attention_ops.rotate_and_store(
        qkv, cache, 0, plan.cells, *angles, norms, num_heads=num_heads, addend=addend(qkv)
    )
    q = qkv[:, : num_heads * dim].view(num_tokens, num_heads, dim)
    attention_ops.attend(q, cache, 0, plan, scale=0.1)


def _launch_norms(
    shape: Shape,
    launched: Callable[[], list[tuple[str, Any]]],
    slots: torch.Tensor | None = None,
) -> dict[str, Any]:
    """The norms of a first layer, of the others, and before the head; with `slots`, projections
    have addends."""
    hidden, weight = (torch.zeros(n, shape.hidden, dtype=DTYPE) for n in (3, 1))
    rows = torch.zeros(2, dtype=torch.int64)
    found = {}
    for label, delta, chosen in (
        ("first", None, None),
        ("inner", hidden, None),
        ("last", hidden, rows),
    ):
        addend = None if slots is None else Addend(hidden, slots)
        elementwise_ops.add_rms_norm(hidden, delta, weight[0], 1e-5, chosen, addend=addend)
        [(name, compiled)] = launched()
        found[f"{name} {label}"] = compiled
    return found


def compiled_kinds(shape: Shape, rows: list[tuple[int, int]]) -> dict[str, dict[str, int]]:
    """As `compiled_step`, of adapters that have more than A and B, alone and in sums."""
    from triton.runtime import driver

    driver.set_active(NoDevice(90))
    found: dict[str, Any] = {}
    shape, lengths = Shape(*shape), [count for _, count in rows]
    with recorded() as launched:
        for kind in ("vectors", "sums"):
            for group, (num_in, num_out) in shape.groups.items():
                _launch_lora(num_in, num_out, lengths, kind)
                found |= {f"{name} {group} of {kind}": each for name, each in launched()}
        _launch_replaced(shape.hidden, len(lengths))
        found |= dict(launched())
    return {name: describe(each)._asdict() for name, each in found.items()}


def _launch_replaced(hidden: int, num_rows: int) -> None:
    table = LoraTable.create(1, 1, torch.zeros(1024, dtype=DTYPE), "cpu", num_weights=1)
    table.set_row(0, TableRow.of([], [ReplacedWeight(0, full=0)]))
    plan = LoraPlan.build([0] * num_rows, [1] * num_rows, table, "cpu")
    x, logits = torch.zeros(num_rows, hidden, dtype=DTYPE), torch.zeros(num_rows, 128)
    replaced_ops.token_weights(x[0], table, plan, 0)
    replaced_ops.replace_embeddings(x, torch.zeros(num_rows, dtype=torch.int64), table, plan, 0)
    replaced_ops.replace_logits(logits, x, table, plan, 0, 128)


def _launch_lora(
    num_in: int, num_out: tuple[int, ...], lengths: list[int], kind: str = "plain"
) -> None:
    arena = torch.zeros(1 << 20, dtype=DTYPE)
    table = LoraTable.create(4, NUM_TARGETS, arena, "cpu", max_rank=MAX_RANK, num_mixes=1)
    is_plain = kind in ("plain", "beside")
    vectors = NO_VECTORS if is_plain else OutputVectors(0, 0, 0)
    table.set_row(0, [TableEntry(1, 0, 0, 1, 16, 16, vectors=vectors)])
    table.set_mix(4, [MixPart(0, 1.0)])
    plan = LoraPlan.build([4 if kind == "sums" else 0] * len(lengths), lengths, table, "cpu")
    assert (plan.has_vectors, plan.has_mixes) == (not is_plain, kind == "sums")
    offsets = tuple(sum(num_out[:k]) for k in range(len(num_out)))
    group = LoraGroup(tuple(range(1, 1 + len(num_out))), num_in, offsets, num_out)
    x = torch.zeros(plan.num_tokens, num_in, dtype=DTYPE)
    out = torch.zeros(plan.num_tokens, group.out_end, dtype=DTYPE)
    if kind == "beside":
        lora_ops.compute_addend(out, x, arena, table, plan, group)
    else:
        lora_ops.add_lora(out, x, arena, table, plan, group, None if is_plain else out[0])


def describe(compiled: Any) -> Compiled:
    """Reads what the assembler made of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        sass = _run("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    registers, stack_bytes = (int(number) for number in found.groups())
    threads = 32 * compiled.metadata.num_warps
    num_ctas = min(
        SM_CTAS,
        SM_THREADS // threads,
        SM_REGISTERS // (-(-registers // 8) * 8 * threads),
        SM_SHARED_BYTES // (compiled.metadata.shared + CTA_SHARED_BYTES),
    )

    def count(pattern: str) -> int:
        return len(re.findall(pattern, sass))

    return Compiled(
        registers,
        stack_bytes,
        num_ctas,
        spills=count(r"\b(?:LDL|STL)\b"),
        wide_loads=count(r"\b(?:LDG|LDGSTS)\b[.\w]*\.128\b"),
        wide_copies=count(r"\bLDGSTS\b[.\w]*\.(?:64|128)\b"),
        narrow_loads=count(r"\bLDG\b[.\w]*\.U?16\b"),
        wgmma=count(r"\bHGMMA\b"),
        mma=count(r"\bHMMA\b"),
    )


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


OPERATIONS = {
    f.__name__: f
    for f in (
        *(compiled_attention, compiled_beside, compiled_experts, compiled_families),
        *(compiled_kinds, compiled_quantised, compiled_recurrence, compiled_step),
    )
}
