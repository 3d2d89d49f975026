"""`python -m inference_svc`, or `loadout serve`: reads settings, then runs the service.

`python -m inference_svc download [--or-folder] NAME[@REVISION]` downloads a model of the Hugging
Face Hub, unless its cache has it, and prints its folder. `python -m inference_svc layout`, with the
flags of a server, prints, as JSON, how that server would describe itself to the store.
`python -m inference_svc quantize TYPE MODEL OUT` writes a model anew with weights in few bits.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from inference_svc.config import InferenceSettings
from inference_svc.errors import EngineFailed, UnsupportedModel
from inference_svc.model.checkpoint.files import check_files
from inference_svc.model.checkpoint.hub import REDIRECT_HOSTS_VARIABLE, download, find_model
from inference_svc.model.gguf.expand import expanded
from servicekit import heap, interpreter_gc
from servicekit.errors import InvalidSetting
from servicekit.hub_client import REDIRECT_HOSTS
from servicekit.settings.load import load_settings, unknown_variables
from servicekit.settings.ports import check_ports
from servicekit.settings.types import split_commas
from servicekit.telemetry.logs import configure_logging

SWITCH_S = 5e-4
"""How long calls, and looks at strangers' connections, wait for the interpreter while a thread
computes: by default ten times as long."""
SPIN_COUNT = 2000
"""How often a computing thread checks whether the others are done before it sleeps: less than a
tenth of a millisecond. By default it is several milliseconds, of a core that the gRPC server, a
pull, or the very thread that it waits for could use."""


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 after a clean stop, 2 for bad settings, 1 if it cannot start."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["download"]:
        return _download(arguments[1:])
    if arguments[:1] == ["layout"]:
        return _print_layout(arguments[1:])
    if arguments[:1] == ["quantize"]:
        return _quantise(arguments[1:])
    try:
        settings = load_settings(InferenceSettings, arguments)
    except InvalidSetting as error:
        return _fail(error, 2)
    configure_logging(settings.log_format, settings.log_level)
    for line in unknown_variables(InferenceSettings):
        logging.getLogger(__name__).warning(line)
    return _run(settings)


def _fail(error: Exception | str, code: int) -> int:
    print(f"loadout: {error}", file=sys.stderr)
    return code


def _download(arguments: list[str]) -> int:
    or_folder = arguments[:1] == ["--or-folder"]
    names = arguments[or_folder:]
    if len(names) != 1:
        usage = "usage: python -m inference_svc download [--or-folder] NAME[@REVISION]"
        print(usage, file=sys.stderr)
        return 2
    # Ends at once, also while threads are downloading; the next download goes on from there.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        say = partial(print, file=sys.stderr, flush=True)
        hosts = split_commas(os.environ.get(REDIRECT_HOSTS_VARIABLE, "")) or REDIRECT_HOSTS
        print(download(names[0], say, or_folder=or_folder, redirect_hosts=hosts))
    except (InvalidSetting, UnsupportedModel, OSError) as error:
        return _fail(error, 1)
    return 0


def _quantise(arguments: list[str]) -> int:
    if len(arguments) != 3:
        print("usage: python -m inference_svc quantize TYPE MODEL OUT", file=sys.stderr)
        return 2
    codes, model, out = arguments

    def report(done: int, total: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if done == total else ""
            print(f"\r{done} of {total} tensors", end=end, file=sys.stderr, flush=True)

    try:
        from inference_svc.model.quantised.conversion import convert  # imports torch

        check_files(Path(model), has_tokenizer=False)
        convert(Path(model), Path(out), codes, report)
    except (UnsupportedModel, OSError) as error:
        return _fail(error, 1)
    return 0


def _print_layout(arguments: list[str]) -> int:
    try:
        with _found_model(load_settings(InferenceSettings, arguments)) as settings:
            from inference_svc.app import describe_layout  # imports torch

            print(describe_layout(settings))
    except (InvalidSetting, UnsupportedModel, OSError) as error:
        return _fail(error, 1)
    return 0


@contextmanager
def _found_model(settings: InferenceSettings) -> Iterator[InferenceSettings]:
    """Yields the settings with the model's folder, whose files have been looked at; of a GGUF file
    it is a folder of its own, under the name of the file's. Raises InvalidSetting, UnsupportedModel
    and OSError."""
    settings = find_model(settings)
    names = {"base_model": settings.base_model_names[0]}
    with expanded(settings.model, has_tokenizer=settings.tokenizer) as folder:
        if folder != settings.model:
            settings = settings.model_copy(update={"model": folder, **names})
        check_files(folder, has_tokenizer=settings.tokenizer)
        yield settings


def _run(settings: InferenceSettings) -> int:
    if "OMP_WAIT_POLICY" not in os.environ:
        # Read once, when torch loads; the engine's process inherits it.
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    # Ranks on devices bound their waits for each other, and name the rank that is missing: NCCL's
    # own watch would end the process that says so.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    with ExitStack() as stack:
        try:
            # The other nodes have no API.
            check_ports(settings, ("metrics_listen",) if settings.node_rank else None)
            settings = stack.enter_context(_found_model(settings))
        except (InvalidSetting, UnsupportedModel, OSError) as error:
            return _fail(error, 1)
        return _serve(settings)


def _serve(settings: InferenceSettings) -> int:
    interpreter_gc.pause()
    heap.bound_arenas()
    # Importing torch takes seconds: after the settings are known to be good.
    from inference_svc.app import serve

    sys.setswitchinterval(SWITCH_S)
    try:
        asyncio.run(serve(settings))
    except (UnsupportedModel, EngineFailed, InvalidSetting, ValueError, OSError) as error:
        logging.getLogger(__name__).debug("ended by an error", exc_info=True)
        return _fail(error.for_operator if isinstance(error, EngineFailed) else error, 1)
    finally:
        interpreter_gc.resume()
    return 0


if __name__ == "__main__":
    sys.exit(main())
