"""`python -m adapter_store`: runs the adapter store until SIGTERM."""

from __future__ import annotations

import asyncio
import sys

from pydantic import ValidationError

from adapter_store.config import Settings, load_settings
from adapter_store.errors import StoreError
from adapter_store.log import setup_logging


def main(arguments: list[str] | None = None) -> int:
    """Gives the exit status: 0 after a clean stop, 2 for bad settings, 1 if it cannot start."""
    try:
        settings = load_settings(sys.argv[1:] if arguments is None else arguments)
    except ValidationError as error:
        for problem in error.errors():
            option = "-".join(str(part) for part in problem["loc"][:1]).replace("_", "-")
            print(f"--{option}: {problem['msg'].removeprefix('Value error, ')}", file=sys.stderr)
        return 2
    setup_logging(settings.log_format, settings.log_level)
    return _run(settings)


def _run(settings: Settings) -> int:
    # Importing torch takes seconds: after the settings are known to be good.
    from adapter_store.server import serve

    try:
        asyncio.run(serve(settings))
    except (StoreError, OSError) as error:
        print(f"the adapter store cannot run: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
