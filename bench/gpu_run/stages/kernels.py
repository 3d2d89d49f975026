"""Times operations that only some families use, including mixtures of experts, and LoRA of every
group against the peers with default and tuned constants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu_run.cases import delta_cases, expert_cases, family_cases, lora_cases
from bench.gpu_run.cases.family_cases import FamilyCase
from bench.gpu_run.cases.lora_cases import Case, Ours, Pool
from bench.gpu_run.cases.peers import LoraCall, Work
from bench.gpu_run.compile_pool import context_of_job, run_jobs
from bench.gpu_run.context import Context, Found, Missing
from bench.gpu_run.stages.tune import FAILURES, make_peer, peer_defaults, tuned_for
from bench.gpu_run.timing import Deadline
from bench.gpu_run.tuning_space import PEER_SPACES, Constants

COMPILE_SHARE = 0.35
"""Maximum share of the stage's time to compile the families' and the peers' kernels in many
processes."""
FAMILIES_SHARE = 0.2
"""Maximum share of the stage's time for operations that only some families use."""
MAX_ERROR = 0.02
"""Maximum relative RMS error of LoRA's addition, and of the families' operations, in 16 bits."""
MAX_S = 0.02
"""Maximum time of one measurement of a family's operation."""


FAMILY_CASES = (family_cases, delta_cases, expert_cases)


def run(context: Context) -> Found:
    """Runs the stage. Raises AssertionError if results are wrong: ours, or a peer's, which means
    that the peer was called wrongly."""
    found: Found = {"families": [], "cells": [], "left_out": [], "missing": {}}
    cases, num_targets = list(lora_cases.cases(context)), lora_cases.num_targets(context)
    if not context.is_emulated:
        found["compiled"] = compile_all(context, context.deadline.left_s * COMPILE_SHARE)
        context.save(found)
    measure_families(context, found)
    pool = Pool(context, cases)
    for case in cases:
        if context.deadline.is_near():
            found["left_out"].append(case.name)
            continue
        work = lora_cases.make_work(context, case, pool)
        cell = describe(context, case, work)
        cell |= measure(context, "ours", Ours(work, case.row_tokens, num_targets), work)
        for name, make in peer_calls(context, case):
            try:
                cell |= measure(context, name, make(work), work)
            except (*FAILURES, Missing) as error:
                found["missing"].setdefault(name.partition("_")[0], str(error))
        found["cells"].append(cell | rate(cell))
        context.save(found)
    wrong = [
        f"{name.removesuffix('_error')}: {cell['case']}"
        for cell in found["cells"]
        for name, value in cell.items()
        if name.endswith("_error") and not value < MAX_ERROR
    ]
    wrong += [cell["case"] for cell in found["families"] if not cell["error"] < MAX_ERROR]
    assert not wrong, f"results differ from the definition: {wrong}"
    return found


def measure_families(context: Context, found: Found) -> None:
    deadline = Deadline(context.deadline.left_s * FAMILIES_SHARE)
    for name in family_names(context):
        if deadline.is_near():
            found["left_out"].append(name)
            continue
        us, error = measure_family(context, make_family(context, name))
        found["families"].append({"case": name, "us": us, "error": error})
        context.save(found)
    measure_torch(context, found)


def measure_torch(context: Context, found: Found) -> None:
    """Adds the times of torch's kernels after all of ours, if they support this device and can be
    recorded. `torch_ratio` is torch's time divided by ours."""
    try:
        for cell in found["families"]:
            case = expert_cases.torch_case(context, cell["case"])
            if case is not None:
                us, error = measure_family(context, case)
                ratio = us / cell["us"]
                cell |= {"torch_us": us, "torch_error": error, "torch_ratio": ratio}
    except FAILURES as error:
        found["missing"]["torch"] = str(error)
    context.save(found)


def measure_family(context: Context, case: FamilyCase) -> tuple[float, float]:
    """Returns a call's microseconds and error."""
    us = context.timer.time_us(case.run, case.num_calls, MAX_S).best_us
    return us, family_cases.error(case)


def family_names(context: Context) -> list[str]:
    return [name for cases in FAMILY_CASES for name in cases.names(context)]


def make_family(context: Context, name: str) -> FamilyCase:
    [cases] = [each for each in FAMILY_CASES if name in each.names(context)]
    found: FamilyCase = cases.make(context, name)
    return found


def compile_all(context: Context, seconds: float) -> Found:
    """Runs the families' cases once, and the peers on every case of LoRA, in many processes.

    The peers compile a kernel for each rank and shape. A case that is not compiled in time is
    compiled when it is measured.
    """
    cases = [*family_names(context), *lora_cases.cases(context)]
    tuned = context.found.get("tune", {}).get("peers", {})
    missing: set[str] = set()
    done = run_jobs(partial(_compile, context.pack, tuned), cases, seconds, missing.update)
    return done | {"missing": sorted(missing)}


def _compile(pack: Path, tuned: Mapping[str, Any], case: Case | str) -> list[str]:
    """Compiles a case of LoRA, or a family's case by its name, in its own process, and returns the
    missing peers."""
    context = context_of_job(pack)
    if isinstance(case, str):
        make_family(context, case).run()
        context.timer.synchronize()
        return []
    # One layer uses every kernel.
    sizes = replace(context.sizes, max_calls=1, case_bytes=0)
    context = replace(context, sizes=sizes, found={"tune": {"peers": tuned}})
    missing: list[str] = []
    work = lora_cases.make_work(context, case, Pool(context, [case]))
    for name, make in peer_calls(context, case):
        try:
            make(work).run(0)
        except (*FAILURES, Missing):
            missing.append(name.partition("_")[0])
    context.timer.synchronize()
    return missing


def describe(context: Context, case: Case, work: Work) -> Found:
    return {
        "case": case.name,
        "group": case.group.name,
        "rank": case.rank,
        "tokens": case.num_tokens,
        "adapters": case.num_adapters,
        "layers": len(work.layers),
        "bound_us": lora_cases.bound_us(context, case),
    }


def measure(context: Context, name: str, call: LoraCall, work: Work) -> Found:
    error = lora_cases.error(call, work)
    times = lora_cases.time_call(context, call, work)
    return {f"{name}_us": times.best_us, f"{name}_error": error}


def peer_calls(context: Context, case: Case) -> Iterator[tuple[str, Callable[[Work], LoraCall]]]:
    """Yields each peer with its default constants and, if it was tuned, with tuned ones.

    Making a peer raises Missing if the pack lacks it. Making or calling it raises one of FAILURES
    if its constants do not fit.
    """
    tuned: Mapping[str, Any] = context.found.get("tune", {}).get("peers", {})

    def maker(name: str, configs: Mapping[str, Constants]) -> Callable[[Work], LoraCall]:
        return lambda work: make_peer(context.pack, name, work, configs)

    for name in PEER_SPACES:
        yield f"{name}_default", maker(name, peer_defaults(name, case))
        configs = tuned_for(tuned.get(name, {}), case)
        if configs is not None:
            yield f"{name}_tuned", maker(name, configs)


def rate(cell: Found) -> Found:
    """Returns shares; `ratio` is the best time of the better peer, divided by ours."""
    theirs = [us for name, us in cell.items() if name.endswith(("_default_us", "_tuned_us"))]
    ours_us = cell["ours_us"]
    return {
        "share_of_bound": cell["bound_us"] / ours_us,
        "ratio": min(theirs) / ours_us if theirs else None,
    }
