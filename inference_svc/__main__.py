"""`python -m inference_svc`: reads settings, then runs the inference service."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from inference_svc.config import parse_command_line
from inference_svc.errors import EngineFailed, UnsupportedModel
from inference_svc.tracing import standard_endpoint
from servicekit.telemetry.logs import configure_logging

SPIN_COUNT = 2000
"""How often a thread that computes looks whether the others are done before it sleeps: less than a
tenth of a millisecond. By default it is several milliseconds, of a core that the gRPC server, a
pull, or the very thread that it waits for could use."""


def main() -> int:
    config = parse_command_line(sys.argv[1:])
    configure_logging(config.log_format, config.log_level)
    if not config.otlp_endpoint:
        try:
            endpoint = standard_endpoint(os.environ)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        config = config.model_copy(update={"otlp_endpoint": endpoint})
    if "OMP_WAIT_POLICY" not in os.environ:
        # Read once, when torch loads; the engine's process inherits it.
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    # Only now: it loads torch, which `--help` and mistyped flags need not wait for.
    from inference_svc.app import serve

    try:
        return asyncio.run(serve(config))
    except (UnsupportedModel, EngineFailed, ValueError, OSError) as error:
        logging.getLogger(__name__).debug("start failed", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
