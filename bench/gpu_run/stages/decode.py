"""Times decode steps of different rows, adapters and contexts against the floor, and the engine's
loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bench.gpu_model.host import engine_steps
from bench.gpu_run.context import Context, Found
from bench.gpu_run.model import BenchModel
from bench.results import median
from inference_svc.backends.cuda.backend import CudaBackend

MARGIN_S = 15.0
"""Time reserved for the engine's loop."""


class Case(NamedTuple):
    """Decode rows that share `num_adapters` adapters. With `has_long` one row has the long context,
    which should not slow the others."""

    num_rows: int
    num_adapters: int
    context: int
    has_long: bool = False


def run(context: Context) -> Found:
    sizes = context.sizes
    model = BenchModel(
        context,
        num_adapters=max(sizes.rows),
        max_rows=max(sizes.rows),
        max_context=sizes.long_context,
        num_pages=max(sizes.rows) * -(-(max(sizes.contexts) + 64) // sizes.page_size),
    )
    backend = model.backend()
    found: Found = {
        "adapter_bytes": model.image_bytes,
        "weights_bytes": model.transformer.weights.num_bytes,
        "kv_pages": model.caches.num_pages - 1,
        "workspace_bytes": backend.workspace_bytes,
        "steps": [],
        "loop": [],
        "left_out": [],
    }
    for case in cases(context):
        if context.deadline.is_near(MARGIN_S if not context.is_emulated else 0.0):
            found["left_out"].append(case._asdict())
            continue
        found["steps"].append(measure(model, backend, case))
        context.save(found)
    for num_rows in sizes.loop_rows:
        for num_adapters in sorted({0, 1, num_rows}):
            if context.deadline.is_near():
                found["left_out"].append({"loop_rows": num_rows, "num_adapters": num_adapters})
                continue
            found["loop"].append(measure_loop(model, backend, num_rows, num_adapters))
            context.save(found)
    found["adapters_cost"] = adapters_cost(context, found["steps"], model.image_bytes)
    return found


def cases(context: Context) -> Iterator[Case]:
    """Yields cases, for each context those with a goal first."""
    sizes = context.sizes
    rows = sorted(sizes.rows, key=lambda n: (n not in sizes.goal_rows, n))
    for tokens in sizes.contexts:
        for num_rows in rows:
            for num_adapters in sorted({0, 1, num_rows}):
                yield Case(num_rows, num_adapters, tokens)
    for num_rows in rows:
        yield Case(num_rows, 0, sizes.contexts[0], has_long=True)


def measure(model: BenchModel, backend: CudaBackend, case: Case) -> Found:
    """Returns medians. `host_ms` is the host's part of a step, until all of it is queued for the
    device."""
    contexts = [case.context] * case.num_rows
    if case.has_long:
        contexts[0] = model.sizes.long_context
    rows = model.sequences(contexts, case.num_adapters)
    times = model.decode_times(backend, rows, model.sizes.steps)
    step_us = 1e6 * median([each.whole for each in times])
    host_us = 1e6 * median([each.host for each in times])
    floor_us = model.floor_us(contexts, min(case.num_rows, case.num_adapters))
    return {
        **case._asdict(),
        "step_ms": step_us / 1e3,
        "host_ms": host_us / 1e3,
        "floor_ms": floor_us / 1e3,
        "share_of_floor": floor_us / step_us,
        "tokens_per_s": case.num_rows / step_us * 1e6,
    }


def measure_loop(
    model: BenchModel, backend: CudaBackend, num_rows: int, num_adapters: int
) -> Found:
    """Times steps of the engine's own loop, from scheduling to encoded outputs, which gives a
    server's share of the floor."""
    sizes = model.sizes
    tokens = sizes.contexts[0]
    found = list(
        engine_steps(
            backend,
            num_rows,
            num_adapters,
            context=tokens,
            page_size=sizes.page_size,
            vocab_size=min(500, model.decoder.vocab_size),
            num_steps=sizes.steps,
            warm_up_steps=sizes.warm_up_steps,
            now_s=model.context.timer.now_s,
        )
    )
    step_us = 1e6 * median([times.whole for times in found])
    host_us = 1e6 * median([times.host for times in found])
    floor_us = model.floor_us([tokens] * num_rows, num_adapters)
    return {
        "num_rows": num_rows,
        "num_adapters": num_adapters,
        "context": tokens,
        "step_ms": step_us / 1e3,
        "host_ms": host_us / 1e3,
        "floor_ms": floor_us / 1e3,
        "share_of_floor": floor_us / step_us,
    }


def adapters_cost(context: Context, steps: list[Found], image_bytes: int) -> list[Found]:
    """Returns the additional time of steps with adapters, with and without the time to read the
    adapters, as shares of a step without adapters."""
    base = {
        (each["num_rows"], each["context"]): each["step_ms"]
        for each in steps
        if not each["num_adapters"] and not each["has_long"]
    }
    found = []
    for each in steps:
        alone_ms = base.get((each["num_rows"], each["context"]))
        if not each["num_adapters"] or alone_ms is None:
            continue
        bytes_ms = each["num_adapters"] * image_bytes / context.bytes_per_us / 1e3
        added_ms = each["step_ms"] - alone_ms
        found.append(
            {
                "num_rows": each["num_rows"],
                "num_adapters": each["num_adapters"],
                "context": each["context"],
                "longer_by": added_ms / alone_ms,
                "longer_above_bytes_by": (added_ms - bytes_ms) / alone_ms,
            }
        )
    return found
