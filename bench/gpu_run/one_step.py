"""Runs single steps of a model of one layer, for use under compute-sanitizer.

python -m bench.gpu_run.one_step [decode] [mixed] [--dtype float32] [--emulate]
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.gpu_run.one_step", description=__doc__)
    parser.add_argument("kinds", nargs="+", choices=("decode", "mixed"))
    parser.add_argument("--dtype", choices=("float32",), help="default: as in the other stages")
    parser.add_argument("--emulate", action="store_true")
    options = parser.parse_args()
    if options.emulate:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from bench.gpu_run.context import Context
    from bench.gpu_run.emulation import on_device
    from bench.gpu_run.model import BenchModel
    from bench.gpu_run.sizes import TINY

    context = Context.make(
        is_emulated=options.emulate,
        seconds=60.0,
        pack=Path(),
        out=Path(),
        found={},
        save=lambda found: None,
    )
    if options.dtype is not None:
        sizes = replace(context.sizes, dtype=getattr(torch, options.dtype))
        context = replace(context, sizes=sizes)
    config = TINY | {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 1}
    with on_device(context):
        model = BenchModel(
            context,
            num_adapters=2,
            max_rows=4,
            max_context=64,
            config=TINY if options.emulate else config,
        )
        # Without a recording, a tool sees every kernel; each takes a hundred times as long.
        backend = model.backend(is_captured=False, is_warm=False)
        *others, prompt = model.sequences([5, 9, 20], 2)
        if "decode" in options.kinds:
            model.decode_times(backend, [*others, prompt], 1, warm_up_steps=0)
        if "mixed" in options.kinds:
            model.prompt_times(backend, prompt, others)
        context.timer.synchronize()
    print(f"done: {', '.join(options.kinds)}")


if __name__ == "__main__":
    main()
