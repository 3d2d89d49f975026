"""Times copies of images into the arena, alone and during steps."""

from __future__ import annotations

from bench.gpu_run.context import Context, Found
from bench.gpu_run.model import BenchModel
from bench.results import median, percentile
from inference_svc.adapters.memory.tiers import HostCopy, TableClear, TableWrite
from inference_svc.backends.cuda.backend import CudaBackend


def run(context: Context) -> Found:
    sizes = context.sizes
    model = BenchModel(
        context,
        num_adapters=sizes.load_images,
        max_rows=sizes.load_rows,
        max_context=sizes.contexts[0],
        host_images=sizes.load_images,
    )
    found: Found = {"alone": alone(model)}
    context.save(found)
    backend = model.backend()
    found["decode"] = beside(model, backend)
    return found


def alone(model: BenchModel) -> Found:
    """Copies each image, waits for it, and makes it visible to kernels. `share_of_bus` is relative
    to the rate of one copy of pinned memory."""
    timer, arena = model.context.timer, model.arena
    seconds = []
    for each in model.loadable:
        arena.apply([TableClear(each.resident.slot)])
        timer.synchronize()
        begin_s = timer.now_s()
        arena.apply([HostCopy(each.host, each.resident)])
        while not arena.pop_completed_copies():
            pass
        arena.apply([TableWrite(each.resident)])
        timer.synchronize()
        seconds.append(timer.now_s() - begin_s)
    gb_per_s = model.image_bytes / median(seconds) / 1e9
    return {
        "image_bytes": model.image_bytes,
        "load_ms": 1e3 * median(seconds),
        "gb_per_s": gb_per_s,
        "share_of_bus": gb_per_s / model.context.ceilings["host_to_device_gb_per_s"],
    }


def beside(model: BenchModel, backend: CudaBackend) -> Found:
    """Times steps of rows with half of the adapters, first without loads, then while the other half
    is loaded one after the other without a pause."""
    timer, arena, sizes = model.context.timer, model.arena, model.sizes
    half = len(model.loadable) // 2
    contexts = [sizes.contexts[0]] * sizes.load_rows
    num_started = num_done = 0

    def keep_loading() -> None:
        nonlocal num_started, num_done
        num_done += len(arena.pop_completed_copies())
        if num_done == num_started:
            each = model.loadable[half + num_started % half]
            arena.apply([HostCopy(each.host, each.resident)])
            num_started += 1

    quiet = model.decode_times(backend, model.sequences(contexts, half), sizes.load_steps)
    rows = model.sequences(contexts, half)
    begin_s = timer.now_s()
    loading = model.decode_times(backend, rows, sizes.load_steps, keep_loading)
    seconds = timer.now_s() - begin_s
    while num_done < num_started:
        num_done += len(arena.pop_completed_copies())
    found: Found = {
        "loads": num_started,
        "loaded_gb_per_s": num_done * model.image_bytes / seconds / 1e9,
    }
    for name, times in (("quiet", quiet), ("loading", loading)):
        milliseconds = [1e3 * each.whole for each in times]
        found[name] = {
            "p50_ms": percentile(milliseconds, 50),
            "p99_ms": percentile(milliseconds, 99),
            "max_ms": max(milliseconds),
        }
    found["p99_ratio"] = found["loading"]["p99_ms"] / found["quiet"]["p99_ms"]
    return found
