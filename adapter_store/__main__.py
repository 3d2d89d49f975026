"""`python -m adapter_store`, or `loadout store`: runs the adapter store until SIGTERM.

`python -m adapter_store` has further commands:

- `digest DIR` prints the digest that a store would give to a local adapter;
- `strip IN OUT [MODEL] [--force]` makes a copy of one without base weights;
- `convert IN OUT [--model DIR] [--initial DIR] [--force]` makes a plain LoRA of one that was
  trained on a changed base, and describes the result as JSON;
- `check DIR [--server FILE] [--allow-config-keys KEY,...]` prints as JSON the verdict of a store on
  one, and of a server if FILE has the output of its `python -m inference_svc layout`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import sys
import time
from pathlib import Path

from adapter_store.config import StoreSettings
from contract.folders import GivenFolder, shown
from servicekit import heap, interpreter_gc
from servicekit.errors import InvalidSetting, ServiceError
from servicekit.settings.load import load_settings, unknown_variables
from servicekit.settings.ports import check_ports
from servicekit.settings.types import split_commas
from servicekit.telemetry.logs import configure_logging

NOISY_LOGGERS = (
    *("boto3", "botocore", "urllib3", "s3transfer"),
    *("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2"),
    "alembic",
)
"""Clients log request headers, signed URLs and credential lookups below WARNING; alembic logs its
plugins."""

PROGRESS_S = 10.0
"""Time between two lines that say how far a command is."""

SWITCH_S = 5e-4
"""How long calls wait for the interpreter while a thread compiles: by default ten times as long."""


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 after a clean stop, 2 for bad settings, 1 if it cannot start."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["digest"]:
        return _print_digest(arguments[1:])
    if arguments[:1] == ["strip"]:
        return _strip(arguments[1:])
    if arguments[:1] == ["convert"]:
        return _convert(arguments[1:])
    if arguments[:1] == ["check"]:
        return _check(arguments[1:])
    try:
        settings = load_settings(StoreSettings, arguments)
        _check_config_keys(settings.allow_config_keys)
    except InvalidSetting as error:
        return _fail(error, 2)
    configure_logging(settings.log_format, settings.log_level, NOISY_LOGGERS)
    for line in unknown_variables(StoreSettings):
        logging.getLogger(__name__).warning(line)
    return _run(settings)


def _fail(error: Exception, code: int) -> int:
    print(f"loadout: {error}", file=sys.stderr)
    return code


def _text(error: Exception) -> str:
    """Returns the error of a command about a folder, with its reason at the end."""
    return f"{error} ({error.reason})" if isinstance(error, ServiceError) else str(error)


def _check_config_keys(allowed: tuple[str, ...]) -> None:
    """Raises InvalidSetting for keys that no operator can let pass."""
    from adapter_store.checkpoint.peft.fields import KNOWN

    known = ", ".join(sorted(KNOWN.intersection(allowed)))
    if known:
        raise InvalidSetting(
            f"--allow-config-keys: leave out {known}: known to this release, which accepts or "
            "refuses such keys by their values"
        )


def _print_digest(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m adapter_store digest DIR", file=sys.stderr)
        return 2
    from adapter_store.checkpoint.open import open_checkpoint
    from adapter_store.checkpoint.reading.files import CheckpointLimits

    # A digest is no verdict: only a store knows its operator's allow-list.
    limits = CheckpointLimits(allowed_config_keys=None)
    try:
        with GivenFolder(arguments[0]) as folder:
            print(open_checkpoint(folder, limits).digest)
    except (ServiceError, OSError) as error:
        print(f"{shown(arguments[0])}: {_text(error)}", file=sys.stderr)
        return 1
    return 0


def _check(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m adapter_store check")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--server", type=Path)
    parser.add_argument("--allow-config-keys", default="")
    options = parser.parse_args(arguments)
    from adapter_store.api.convert import from_json
    from adapter_store.checkpoint.reading.files import CheckpointLimits
    from adapter_store.images.plan.check import Server, check_folder

    allowed, server = split_commas(options.allow_config_keys), None
    try:
        if options.server is not None:
            server = Server(*from_json(options.server.read_text()))
        limits = CheckpointLimits(allowed_config_keys=frozenset(allowed))
        report = check_folder(options.folder, limits, server)
    except (ServiceError, OSError) as error:
        print(f"{shown(options.folder)}: {_text(error)}", file=sys.stderr)
        return 1
    print(json.dumps(dataclasses.asdict(report)))
    return 0


def _strip(arguments: list[str]) -> int:
    force = arguments[-1:] == ["--force"]
    paths = [Path(each) for each in (arguments[:-1] if force else arguments)]
    if len(paths) not in (2, 3):
        print("usage: python -m adapter_store strip IN OUT [MODEL] [--force]", file=sys.stderr)
        return 2
    from adapter_store.checkpoint.conversion.strip import strip

    try:
        found, num_kept = strip(*paths, force=force)
    except (ServiceError, OSError) as error:
        print(_text(error), file=sys.stderr)
        return 1
    for each in found:
        compared = "not compared" if each.difference is None else each.difference
        print(f"stripped {each.name} {list(each.shape)}: {compared or 'equals the base'}")
    print(f"{len(found)} stripped, {num_kept} kept in {shown(paths[1])}")
    return 0


def _convert(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m adapter_store convert")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--initial", type=Path)
    parser.add_argument("--force", action="store_true")
    options = parser.parse_args(arguments)
    from adapter_store.checkpoint.conversion.convert import convert

    said_s = time.monotonic()

    def say(done: int, total: int, name: str) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= PROGRESS_S:
            said_s = time.monotonic()
            print(f"progress: {done} of {total} modules: {name}", file=sys.stderr, flush=True)

    try:
        report = convert(**vars(options), progress=say)
    except (ServiceError, OSError) as error:
        print(_text(error), file=sys.stderr)
        return 1
    print(json.dumps(dataclasses.asdict(report)))
    return 0


def _run(settings: StoreSettings) -> int:
    try:
        check_ports(settings)
    except OSError as error:
        return _fail(error, 1)
    interpreter_gc.pause()
    heap.bound_arenas()
    # Importing torch takes seconds: after the settings are known to be good.
    from adapter_store.app import serve

    sys.setswitchinterval(SWITCH_S)
    try:
        asyncio.run(serve(settings))
    except (ServiceError, OSError) as error:
        return _fail(error, 1)
    finally:
        interpreter_gc.resume()
    return 0


if __name__ == "__main__":
    sys.exit(main())
