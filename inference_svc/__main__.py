"""`python -m inference_svc`: reads settings, then runs the inference service."""

from __future__ import annotations

import asyncio
import logging
import sys

from inference_svc.config import parse_command_line
from inference_svc.errors import UnsupportedModel
from inference_svc.log import configure_logging


def main() -> int:
    config = parse_command_line(sys.argv[1:])
    configure_logging(config.log_format, config.log_level)
    # Only now: it loads torch, which `--help` and mistyped flags need not wait for.
    from inference_svc.start import serve

    try:
        return asyncio.run(serve(config))
    except (UnsupportedModel, ValueError, OSError) as error:
        logging.getLogger(__name__).debug("start failed", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
