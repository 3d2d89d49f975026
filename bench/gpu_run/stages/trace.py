"""Writes the profiler's trace of a recorded step and of a mixed one."""

from __future__ import annotations

import gzip
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.gpu_run.context import Context, Found
from bench.gpu_run.model import BenchModel

NUM_SHOWN = 12


def run(context: Context) -> Found:
    sizes = context.sizes
    model = BenchModel(
        context,
        num_adapters=2,
        max_rows=sizes.load_rows + 1,
        max_context=max(sizes.contexts[0], *sizes.prompts[:2]),
    )
    backend = model.backend()
    contexts = [sizes.contexts[0]] * sizes.load_rows
    *others, prompt = model.sequences([*contexts, sizes.prompts[1]], 2)
    model.decode_times(backend, others, 1)  # not traced, because the first step takes longer
    found: Found = {}
    steps: dict[str, Callable[[], object]] = {
        "decode": lambda: model.decode_times(backend, others, 1, warm_up_steps=0),
        "mixed": lambda: model.prompt_times(backend, prompt, others),
    }
    for name, step in steps.items():
        if name == "mixed" and not context.is_emulated:
            step()
        found[name] = trace(context, name, step)
        context.save(found)
    return found


def trace(context: Context, name: str, step: Callable[[], object]) -> Found:
    """Writes the trace of `step`, and returns the device's time by kernel."""
    kind = DeviceType.CPU if context.is_emulated else DeviceType.CUDA
    activities = [ProfilerActivity.CPU]
    if not context.is_emulated:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        step()
        context.timer.synchronize()
    file = context.out / f"trace_{name}.json.gz"
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(file, "wb", compresslevel=3) as target:
            shutil.copyfileobj(source, target)
    events: list[Any] = [event for event in profiler.events() or [] if event.device_type == kind]
    return {"file": file.name, **account(events)}


def account(events: list[Any]) -> Found:
    """Returns microseconds by the name of the kernel or copy, and the device's idle time."""
    by_name: Counter[str] = Counter()
    busy_us, end_us = 0.0, None
    for event in sorted(events, key=lambda event: event.time_range.start):
        start, stop = event.time_range.start, event.time_range.end
        by_name[event.name] += stop - start
        busy_us += max(0.0, stop - (start if end_us is None else max(start, end_us)))
        end_us = stop if end_us is None else max(stop, end_us)
    first_us = min((event.time_range.start for event in events), default=0.0)
    whole_us = (end_us or 0.0) - first_us
    return {
        "events": len(events),
        "whole_us": whole_us,
        "idle_us": whole_us - busy_us,
        "longest": [
            {"name": name[:120], "us": us, "count": sum(e.name == name for e in events)}
            for name, us in by_name.most_common(NUM_SHOWN)
        ],
    }
