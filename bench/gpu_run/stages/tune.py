"""Measures the constants of kernels, ours and the peers', for the same time.

For every kernel, each constant is changed on its own. Then all improvements are combined, and kept
if they are better together. A change counts only if it is faster in both of two measurements and
the kernel's results stay the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton.errors import TritonError

from bench.gpu_run.cases import delta_cases, kernel_cases, lora_cases
from bench.gpu_run.cases.kernel_cases import Problem
from bench.gpu_run.cases.lora_cases import Case, Pool
from bench.gpu_run.cases.peers import LoraCall, Sglang, Vllm, Work, default_chunk
from bench.gpu_run.compile_pool import context_of_job, run_jobs
from bench.gpu_run.context import Context, Found, Missing
from bench.gpu_run.model import read_description
from bench.gpu_run.timing import Deadline
from bench.gpu_run.tuning_space import PEER_SPACES, SGLANG_DEFAULT, SPACE, Constants
from kernels import tuning
from kernels.elementwise.triton_ops import power_of_2

TABLE = "tuned.json"
COMPILE_SHARE = 0.4
"""Maximum share of the stage's time to compile the measured kernels in many processes."""
MAX_S = 0.02
"""Maximum time of one measurement; each problem has two."""
MIN_GAIN = 0.02
"""Minimum gain of new constants; less is noise."""
MAX_DIFFERENCE = 0.02
"""Maximum relative RMS difference of results, from sums in another order, in 16 bits."""
FAILURES = (TritonError, RuntimeError, ValueError)
"""Exceptions from constants that do not fit the device or the kernel."""

Measure = Callable[[Constants], "list[float] | None"]
"""Microseconds of each problem, or None if the results differ from the defaults' results."""


def run(context: Context) -> Found:
    found: Found = {"best": {}, "ours": {}, "peers": {}, "missing": {}}
    if not context.is_emulated:
        found["compiled"] = compile_all(context, context.deadline.left_s * COMPILE_SHARE)
        context.save(found)
    pool = make_pool(context)
    most = context.sizes.tune_configs
    ours = Deadline(context.deadline.left_s / 2)
    problems_of = kernel_cases.problems(context, pool)
    for index, (kernel, problems) in enumerate(problems_of.items()):
        # Later kernels share the time that this one does not use. Emulated, each tries one value,
        # and one kernel may take as long as all others.
        num_left = 1 if context.is_emulated else len(problems_of) - index
        deadline = Deadline(ours.left_s / num_left)
        measure = Ours(context, kernel, problems).measure
        best, entry = search(default_of(context, kernel), SPACE[kernel], measure, deadline, most)
        found["ours"][kernel] = entry | {"problems": [each.name for each in problems]}
        if best != default_of(context, kernel):
            found["best"][kernel] = best
        write_table(context, found["best"])
        context.save(found)
    work = [(case, name) for case in kernel_cases.peer_cases(context) for name in PEER_SPACES]
    for index, (case, name) in enumerate(work):
        seconds = context.deadline.left_s / (len(work) - index)
        try:
            tune_peer(context, found, name, case, pool, seconds)
        except (*FAILURES, Missing) as error:
            found["missing"][name] = str(error)
        context.save(found)
        if context.deadline.is_near():
            break
    return found


def make_pool(context: Context) -> Pool:
    cases = (*kernel_cases.few_cases(context), *kernel_cases.peer_cases(context))
    return Pool(context, cases)


def default_of(context: Context, kernel: str) -> Constants:
    """Returns the constants of `kernel` for the model under measurement."""
    g = read_description(context.sizes.config)
    head_dim = g.attentions[0].head_dim
    facts = {
        "decode": {"head_dim": head_dim},
        "combine": {"head_dim": head_dim},
        "prefill": {"head_dim": head_dim, "itemsize": context.sizes.dtype.itemsize},
        "store": {"head_dim": head_dim},
        "add_rms_norm": {"size": g.hidden_size},
        "swiglu": {"size": g.max_intermediate_size},
        "combine_experts": {"size": context.sizes.mixture.hidden},
        "causal_conv": {"channels": delta_cases.channels_of(context.sizes.delta)},
        "delta_step": {"key_size": context.sizes.delta.key_size},
        "gated_norm": {"size": context.sizes.delta.value_size},
    }
    facts["delta_chunks"] = facts["delta_step"] | {"itemsize": context.sizes.dtype.itemsize}
    facts |= {
        f"experts_{name}": {"itemsize": context.sizes.dtype.itemsize}
        for name in ("short", "middle", "long")
    }
    of_few_bits = {"itemsize": context.sizes.dtype.itemsize, "bits": 4}
    facts |= {
        f"quantised_{name}": of_few_bits for name in ("narrow", "wide", "short", "middle", "long")
    }
    return dict(tuning.constants(kernel, **facts.get(kernel, {})))


def trials(default: Constants, space: Mapping[str, Sequence[int]]) -> Iterator[Constants]:
    """Yields the default, then each constant changed on its own."""
    yield default
    for name, values in space.items():
        for value in values:
            if value != default[name]:
                yield default | {name: value}


def search(
    default: Constants,
    space: Mapping[str, Sequence[int]],
    measure: Measure,
    deadline: Deadline,
    most: int,
) -> tuple[Constants, Found]:
    """Returns the best constants, and all trials. Raises ValueError if the default is wrong.

    A trial's time is a share of the default's: the geometric mean over the problems, in the slower
    of two measurements. There is no second measurement if the first is not faster.
    """
    first = measure(default)
    if first is None:
        raise ValueError(f"the default {default} does not run, or its results are wrong")
    base = [min(pair) for pair in zip(first, measure(default) or first, strict=True)]
    tried: list[Found] = []

    def share(constants: Constants) -> float | None:
        both: list[float] = []
        for _ in range(2):
            times = measure(constants)
            if times is None:
                return None
            logs = [math.log(us / of) for us, of in zip(times, base, strict=True)]
            both.append(math.exp(sum(logs) / len(logs)))
            if both[0] > 1.0 - MIN_GAIN:
                break
        tried.append({"changed": changed(constants, default), "share_of_default": max(both)})
        return max(both)

    better: Constants = {}
    best, best_share = default, 1.0 - MIN_GAIN
    shares: dict[str, float] = {}
    for constants in list(trials(default, space))[1 : most + 1]:
        if deadline.is_near():
            break
        found = share(constants)
        [(name, value)] = changed(constants, default).items()
        if found is not None and found < min(shares.get(name, 1.0), 1.0 - MIN_GAIN):
            shares[name], better[name] = found, value
        if found is not None and found < best_share:
            best, best_share = constants, found
    if len(better) > 1 and not deadline.is_near():
        together = share(default | better)
        if together is not None and together < best_share:
            best, best_share = default | better, together
    entry = {
        "default_us": base,
        "tried": tried,
        "best": best,
        "share_of_default": best_share if best != default else 1.0,
        "was_cut_short": deadline.is_near(),
    }
    return best, entry


def changed(constants: Constants, default: Constants) -> Constants:
    return {name: value for name, value in constants.items() if value != default[name]}


class Ours:
    """Measures one of our kernels on its problems."""

    def __init__(self, context: Context, kernel: str, problems: Sequence[Problem]) -> None:
        self._context, self._kernel, self._problems = context, kernel, problems
        self._expected: list[torch.Tensor] = []

    def measure(self, constants: Constants) -> list[float] | None:
        times = []
        try:
            with tuning.overridden(self._kernel, **constants):
                for index, problem in enumerate(self._problems):
                    prepared = problem.prepare()
                    got = prepared.result().float().clone()
                    if index == len(self._expected):
                        self._expected.append(got)
                    if not relative(got, self._expected[index]) < MAX_DIFFERENCE:
                        return None
                    timer = self._context.timer
                    times.append(timer.time_us(prepared.run, prepared.num_calls, MAX_S).best_us)
        except FAILURES:
            if not self._expected:
                raise
            return None
        return times


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def tune_peer(
    context: Context, found: Found, name: str, case: Case, pool: Pool, seconds: float
) -> None:
    """Searches each part of the peer's constants for this case. Raises Missing without the peer,
    and one of FAILURES if its own constants fail."""
    work = lora_cases.make_work(context, case, pool)
    chosen = peer_defaults(name, case)
    # Raises Missing before any measurement, if the pack lacks the peer.
    make_peer(context.pack, name, work, chosen)
    parts: Found = {}
    for index, (part, space) in enumerate(PEER_SPACES[name].items()):
        deadline = Deadline(seconds / (len(PEER_SPACES[name]) - index))

        def measure(constants: Constants, part: str = part) -> list[float] | None:
            try:
                call = make_peer(context.pack, name, work, chosen | {part: constants})
                if not lora_cases.error(call, work) < MAX_DIFFERENCE:
                    return None
                return [lora_cases.time_call(context, call, work, MAX_S).best_us]
            except FAILURES:
                return None

        chosen[part], parts[part] = search(
            chosen[part], space, measure, deadline, context.sizes.tune_configs
        )
    found["peers"].setdefault(name, {})[case_key(case)] = {"configs": chosen, "parts": parts}


def make_peer(pack: Path, name: str, work: Work, configs: Mapping[str, Constants]) -> LoraCall:
    """Makes a peer's kernels. Raises Missing if the pack lacks the peer."""
    kind = Vllm if name == "vllm" else Sglang
    call: LoraCall = kind(pack, work, configs)
    return call


def peer_defaults(name: str, case: Case) -> dict[str, Constants]:
    """Returns the peer's own constants; see vLLM's `get_lora_op_configs`."""
    if name == "sglang":
        return {"both": {"chunk": default_chunk(case.num_tokens)}, **SGLANG_DEFAULT}
    is_short = case.num_tokens < 128
    common = {"num_warps": 4, "num_ctas": 1, "num_stages": 2}
    return {
        "shrink": {
            "block_m": 32,
            "block_n": 16,
            "block_k": 256 if is_short else 32,
            "split_k": 64 if is_short else 8,
            "group_size_m": 8,
            **common,
        },
        "expand": {
            "block_m": 64,
            "block_n": 64 if len(case.group.widths) > 1 else 128,
            "block_k": 32,
            **common,
        },
    }


def case_key(case: Case) -> str:
    """Returns the key of a peer's constants: by shape and tokens, as in its own files."""
    return f"{case.group.name}, {power_of_2(case.num_tokens)}"


def tuned_for(tuned: Mapping[str, Any], case: Case) -> dict[str, Constants] | None:
    """Returns a peer's constants for the nearest number of tokens of the same group, or None
    without a measurement."""
    known = {}
    for key, entry in tuned.items():
        group, _, tokens = key.rpartition(", ")
        if group == case.group.name:
            known[int(tokens)] = entry["configs"]
    if not known:
        return None
    nearest = min(known, key=lambda tokens: abs(math.log2(tokens / case.num_tokens)))
    return dict(known[nearest])


def write_table(context: Context, best: Mapping[str, Constants]) -> None:
    """Writes the best constants in the form of `kernels/tuning`, for review and commit there: each
    kernel's default rules, with the rule for this model replaced."""
    default = tuning.read_table(tuning.path_of(tuning.DEFAULT))
    table = {kernel: [*default[kernel][:-1], constants] for kernel, constants in best.items()}
    path = context.out / TABLE
    path.write_text(json.dumps(table, indent=1) + "\n")
    tuning.read_table(path, default)


def compile_all(context: Context, seconds: float) -> Found:
    """Runs every trial once, in many processes, so that Triton finds it compiled later. A trial
    that is not compiled in time is compiled when it is measured."""
    failed = []

    def note(result: tuple[Job, bool]) -> None:
        job, is_good = result
        if not is_good:
            failed.append(job._asdict())

    jobs = list(_jobs(context))
    return run_jobs(partial(_compile, context.pack), jobs, seconds, note) | {"failed": failed}


class Job(NamedTuple):
    """A trial of one of our kernels, or of a peer's part for the case with this number."""

    kernel: str
    constants: Constants
    peer: str = ""
    case: int = 0


def _jobs(context: Context) -> Iterator[Job]:
    """Yields our trials and the peers' in turn, so that none has fewer compiled than the others."""
    ours = [
        Job(kernel, constants)
        for kernel, space in SPACE.items()
        for constants in trials(default_of(context, kernel), space)
    ]
    theirs = [
        Job(part, constants, name, index)
        for index, case in enumerate(kernel_cases.peer_cases(context))
        for name, spaces in PEER_SPACES.items()
        for part, space in spaces.items()
        for constants in trials(peer_defaults(name, case)[part], space)
    ]
    for index in range(max(len(ours), len(theirs))):
        yield from ours[index : index + 1]
        yield from theirs[index : index + 1]


def _compile(pack: Path, job: Job) -> tuple[Job, bool]:
    """Runs a trial in its own process, and returns whether its constants can be compiled."""
    context = context_of_job(pack)
    # One layer uses every kernel.
    context = replace(context, sizes=replace(context.sizes, max_calls=1, case_bytes=0))
    pool = make_pool(context)
    try:
        if job.peer:
            case = kernel_cases.peer_cases(context)[job.case]
            work = lora_cases.make_work(context, case, pool)
            configs = peer_defaults(job.peer, case) | {job.kernel: job.constants}
            make_peer(pack, job.peer, work, configs).run(0)
        else:
            with tuning.overridden(job.kernel, **job.constants):
                for problem in kernel_cases.problems(context, pool)[job.kernel]:
                    problem.prepare().result()
        context.timer.synchronize()
    except (*FAILURES, Missing):
        return job, False
    return job, True
