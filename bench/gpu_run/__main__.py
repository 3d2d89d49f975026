"""The command line of the GPU run; see the package."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

PACK = Path(".gpu-pack")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/gpu_run.sh", description="Measures and tests everything that needs a GPU."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument(
        "--pack",
        type=Path,
        default=PACK,
        help="folder of `make gpu-pack` (default: %(default)s)",
    )
    parser.add_argument(
        "--stages", help="numbers, ranges or names, such as 0,4-6,trace (default: all)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="skip stages that passed in the folder's results"
    )
    parser.add_argument(
        "--seconds", type=float, help="for all of these stages (default: as long as each needs)"
    )
    parser.add_argument(
        "--emulate",
        action="store_true",
        help="without a device: tiny shapes, Triton's interpreter, made-up durations",
    )
    return parser


def main() -> int:
    """Returns 1 if a stage has not passed, whether or not the goals are met."""
    options = make_parser().parse_args()
    if options.emulate:
        os.environ["TRITON_INTERPRET"] = "1"  # read once, when Triton is imported
        # For numpy, as in tests/support/kernels/worker_process.py: a row's sum is its own.
        os.environ["OPENBLAS_CORETYPE"] = "Nehalem"
    from bench.gpu_run import goals, run

    try:
        stages = run.chosen_stages(options.stages or f"0-{len(run.STAGES) - 1}")
        run.budgets(stages, options.seconds)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results = run.run_all(
        run.Options(
            out=options.out,
            pack=options.pack,
            stages=stages,
            is_emulated=options.emulate,
            resume=options.resume,
            seconds=options.seconds,
        )
    )
    print(goals.table(results["summary"]))
    return int(any(results["stages"][name]["status"] != run.PASSED for name in stages))


if __name__ == "__main__":
    sys.exit(main())
