"""`loadout store` and `loadout serve`: this process becomes the service, with the same flags."""

from __future__ import annotations

import os
import sys

import typer

PASS_ON = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "allow_interspersed_args": True,
    "help_option_names": [],
}
"""Settings of a command whose flags, --help included, belong to the service."""


def run_store(context: typer.Context) -> None:
    """Run the adapter store.

    It fetches, checks and stores adapters, compiles them and streams them to inference services.
    """
    _become("adapter_store", context.args)


def run_serve(context: typer.Context) -> None:
    """Run the inference service.

    It serves one base model and any mix of its adapters in one batch.
    """
    _become("inference_svc", context.args)


def _become(module: str, arguments: list[str]) -> None:
    """Replaces this process, so that signals and the exit code are the service's own."""
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
