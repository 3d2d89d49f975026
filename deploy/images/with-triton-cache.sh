#!/bin/sh
# Runs a command after it has copied the modules that Triton cannot compile here to where it looks
# for them. Kernels compiled for this GPU lie beside them and are left as they are.
set -eu
mkdir -p "$TRITON_CACHE_DIR"
cp -R --update "$TRITON_SEED_DIR/." "$TRITON_CACHE_DIR"
exec "$@"
