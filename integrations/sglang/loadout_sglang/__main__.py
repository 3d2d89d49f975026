"""python -m loadout_sglang --engine http://127.0.0.1:30000 [--filter TERMS] [--listen HOST:PORT]

Keeps SGLang's adapters as the store's catalog has them. The connection to the store, the folder for
adapters and the names of the model come from the environment: see the README.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys

from loadout.errors import LoadoutError
from loadout.integrations.adapter_folders import AdapterFolders
from loadout.integrations.engine_settings import EngineSettings, read_settings
from loadout_sglang.engine import Engine
from loadout_sglang.sidecar import Sidecar, Wish
from loadout_sglang.table import serve_table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadout_sglang")
    parser.add_argument("--engine", required=True, metavar="URL", help="SGLang's HTTP server.")
    parser.add_argument(
        "--filter", default="", help='Terms of the adapters to load, such as "label.stage=live".'
    )
    parser.add_argument(
        "--max-adapters", type=int, default=256, help="Most adapters to load. Default: 256."
    )
    parser.add_argument("--listen", default="127.0.0.1:30080", help="Address of GET /adapters.")
    return parser.parse_args()


async def _run(arguments: argparse.Namespace, settings: EngineSettings) -> None:
    if not settings.base_models:
        raise SystemExit("LOADOUT_BASE_MODEL is not set: how do adapters name the engine's model?")
    host, _, port = arguments.listen.rpartition(":")
    engine = Engine(arguments.engine, os.environ.get("SGLANG_API_KEY", "").strip())
    wish = Wish(arguments.filter, settings.base_models, arguments.max_adapters)
    async with settings.client() as client:
        folders = AdapterFolders(client, settings.cache, settings.cache_bytes)
        server = serve_table(host, int(port), lambda: wish.table)
        running = asyncio.ensure_future(Sidecar(client, folders, engine, wish).run())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, running.cancel)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await running
        finally:
            server.shutdown()
            await folders.close()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    arguments = _arguments()
    try:
        asyncio.run(_run(arguments, read_settings(os.environ)))
    except (LoadoutError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
