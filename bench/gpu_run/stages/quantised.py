"""Times a layer's products with weights in few bits against the bytes that they read, and against
the same products in the model's dtype."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from bench.gpu_run.cases.quantised_cases import FIRST, FORMATS, Products, projections
from bench.gpu_run.compile_pool import context_of_job, run_jobs
from bench.gpu_run.context import Context, Found

COMPILE_SHARE = 0.5
"""Maximum share of the stage's time to compile the kernels in many processes."""
MAX_ERROR = 0.02
"""Maximum relative RMS error of a product, in 16 bits."""
MAX_S = 0.01
"""Maximum time of one measurement."""


class Cell(NamedTuple):
    """A layer with weights of a format, in a step of so many rows."""

    form: str
    num_rows: int


def run(context: Context) -> Found:
    """Runs the stage. Raises AssertionError if results are wrong."""
    found: Found = {"cells": [], "left_out": []}
    # Each number of rows in the first format before the others.
    cells = [Cell(form, rows) for form in FORMATS for rows in context.sizes.quantised_rows]
    if not context.is_emulated:
        seconds = context.deadline.left_s * COMPILE_SHARE
        found["compiled"] = run_jobs(partial(_compile, context.pack), cells, seconds, _ignore)
        context.save(found)
    plain_us = {rows: _plain_us(context, rows) for rows in context.sizes.quantised_rows}
    for cell in cells:
        if context.deadline.is_near():
            found["left_out"].append(cell._asdict())
            continue
        found["cells"].append(measure(context, cell, plain_us[cell.num_rows]))
        context.save(found)
    wrong = [each["format"] for each in found["cells"] if not each["error"] < MAX_ERROR]
    assert not wrong, f"results differ from the definition: {wrong}"
    return found


def measure(context: Context, cell: Cell, plain_us: float) -> Found:
    """Returns a layer's microseconds, the share that reading its weights would take, and the speed
    in units of the model's dtype."""
    us = num_bytes = error = 0.0
    for projection in projections(context):
        products = Products(context, FORMATS[cell.form], projection, cell.num_rows)
        us += context.timer.time_us(products.run, len(products.weights), MAX_S).best_us
        num_bytes += products.num_bytes
        got, wanted = products.result().double(), products.wanted().double()
        error = max(error, float((got - wanted).norm() / wanted.norm()))
    return {
        "format": cell.form,
        "rows": cell.num_rows,
        "us": us,
        "floor_us": num_bytes / context.bytes_per_us,
        "share_of_floor": num_bytes / context.bytes_per_us / us,
        "plain_us": plain_us,
        "speed": plain_us / us,
        "error": error,
    }


def _plain_us(context: Context, num_rows: int) -> float:
    found = 0.0
    for projection in projections(context):
        calls, num_calls = Products(context, FORMATS[FIRST], projection, num_rows).plain()
        found += context.timer.time_us(calls, num_calls, MAX_S).best_us
    return found


def _compile(pack: Path, cell: Cell) -> None:
    """Runs a cell's products once, in a process of its own."""
    context = context_of_job(pack)
    for projection in projections(context):
        Products(context, FORMATS[cell.form], projection, cell.num_rows).result()
    torch.cuda.synchronize()


def _ignore(nothing: None) -> None:
    """Compiled kernels are found in Triton's cache."""
