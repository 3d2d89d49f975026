#!/bin/sh
# The GPU run: see docs/development/gpu-run.md, or --help.
cd "$(dirname "$0")/.." && exec "${PYTHON:-python3}" -m bench.gpu_run "$@"
