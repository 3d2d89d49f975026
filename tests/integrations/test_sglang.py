"""The sidecar over a real store, and a server that speaks SGLang 0.5's calls for adapters."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from loadout_sglang import sidecar
from loadout_sglang.engine import Engine, EngineAway, EngineError
from loadout_sglang.sidecar import Sidecar, Wish
from loadout_sglang.table import serve_table

from contract.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from loadout import AsyncClient
from loadout.integrations.adapter_folders import AdapterFolders
from tests.support.store.adapters import BASE_MODEL, save_adapter
from tests.support.store.served import Served
from tests.support.wait import until

pytestmark = [pytest.mark.processes]

ROOT = Path(__file__).parents[2]
WAIT_S = 20.0
KEY = "secret"


class Engines:
    """Adapters by name as SGLang holds them: it refuses a name that it has, and a rank above 8."""

    def __init__(self) -> None:
        self.loaded: dict[str, str] = {}
        self.calls: list[tuple[str, str]] = []
        engines = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                base = {"id": "base", "root": "base", "parent": None}
                adapters = [
                    {"id": name, "root": path, "parent": "base"}
                    for name, path in engines.loaded.items()
                ]
                self.answer(200, {"object": "list", "data": [base, *adapters]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.headers["Authorization"] != f"Bearer {KEY}":
                    self.answer(401, {"error": "Unauthorized"})
                    return
                route = self.path.removeprefix("/").removesuffix("_lora_adapter")
                engines.calls.append((route, body["lora_name"]))
                why = getattr(engines, route)(**body)
                answer = {"success": not why, "error_message": why}
                self.answer(400 if why else 200, {**answer, "loaded_adapters": engines.loaded})

            def answer(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def load(self, lora_name: str, lora_path: str) -> str | None:
        if lora_name in self.loaded:
            return f"LoRA adapter {lora_name} is already loaded"
        assert (Path(lora_path) / WEIGHTS_FILE).is_file()
        if json.loads((Path(lora_path) / CONFIG_FILE).read_text())["r"] > 8:
            return "rank is above max_lora_rank"
        self.loaded[lora_name] = lora_path
        return None

    def unload(self, lora_name: str) -> str | None:
        return None if self.loaded.pop(lora_name, None) else f"{lora_name} is not loaded"

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def engines() -> Iterator[Engines]:
    made = Engines()
    yield made
    made.close()


class House:
    def __init__(self, store: Served, engines: Engines, root: Path) -> None:
        self.wish = Wish("", (BASE_MODEL,), max_adapters=16)
        self.client = AsyncClient(store=store.running.grpc_address)
        self.folders = AdapterFolders(self.client, root, 1 << 30)
        engine = Engine(engines.url, KEY)
        made = Sidecar(self.client, self.folders, engine, self.wish)
        self.running = asyncio.create_task(made.run())

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not is_so():
                assert not self.running.done(), self.running
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.folders.close()
        await self.client.close()


def run(
    store: Served, engines: Engines, root: Path, test: Callable[[House], Awaitable[None]]
) -> None:
    async def main() -> None:
        house = House(store, engines, root)
        try:
            await test(house)
        finally:
            await house.close()

    asyncio.run(main())


def test_the_engine_gets_each_version_under_its_name_and_loses_the_one_before(
    store: Served, engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar, "COMPARE_SECONDS", 0.2)
    client = store.client
    client.register("french", save_adapter(tmp_path / "v1", seed=1))
    client.register("high", save_adapter(tmp_path / "high", rank=16))
    client.register("alora", save_adapter(tmp_path / "alora", alora_invocation_tokens=[3]))
    client.register("other", save_adapter(tmp_path / "other", seed=9), base_model="org/other")
    engines.loaded["mine"] = "/somewhere/else"

    async def test(house: House) -> None:
        await house.until(lambda: len(house.wish.table) == 3)
        assert set(engines.loaded) == {"default/french@1", "mine"}
        table = house.wish.table
        assert table["default/french"].is_current
        assert "max_lora_rank" in table["default/high"].error
        assert "aLoRA" in table["default/alora"].error

        await asyncio.to_thread(client.register, "french", save_adapter(tmp_path / "v2", seed=2))
        await house.until(lambda: "default/french@1" not in engines.loaded)
        assert set(engines.loaded) == {"default/french@2", "mine"}
        of_french = [call for call in engines.calls if "french" in call[1]]
        assert of_french == [
            ("load", "default/french@1"),
            ("load", "default/french@2"),  # first: somebody can be served at any time
            ("unload", "default/french@1"),
        ]

        engines.loaded.clear()  # it has started anew
        await house.until(lambda: "default/french@2" in engines.loaded)
        await house.client.delete("french")
        await house.until(lambda: not engines.loaded)

    run(store, engines, tmp_path / "cache", test)


def test_a_sidecar_that_starts_anew_takes_over(
    store: Served, engines: Engines, tmp_path: Path
) -> None:
    store.client.register("french", save_adapter(tmp_path / "v1"))

    async def test(house: House) -> None:
        await house.until(lambda: bool(house.wish.table))
        assert (Path(engines.loaded["default/french@1"]) / WEIGHTS_FILE).is_file()

    run(store, engines, tmp_path / "cache", test)
    run(store, engines, tmp_path / "cache", test)
    assert engines.calls == [("load", "default/french@1")]


def test_an_engine_that_is_away_or_refuses_is_told_apart(engines: Engines) -> None:
    with pytest.raises(EngineError, match="Unauthorized"):
        Engine(engines.url, "other").unload("a")
    with pytest.raises(EngineError, match="not loaded"):
        Engine(engines.url, KEY).unload("a")
    with pytest.raises(EngineAway):
        Engine("http://127.0.0.1:9").loaded()


def test_the_table_tells_callers_the_name_to_ask_for() -> None:
    table = {
        "default/french": sidecar.Entry(3, "sha256:00", 2, ""),
        "default/dora": sidecar.Entry(1, "sha256:01", 0, "more than a plain LoRA"),
    }
    server = serve_table("127.0.0.1", 0, lambda: table)
    try:
        url = f"http://127.0.0.1:{server.server_port}/adapters"
        with urllib.request.urlopen(url, timeout=WAIT_S) as response:
            found = json.load(response)["adapters"]
    finally:
        server.shutdown()
        server.server_close()
    assert found["default/french"]["model"] == "default/french@2"
    assert found["default/dora"]["model"] is None
    assert found["default/dora"]["error"]


def test_the_program_follows_its_filter_until_it_is_asked_to_end(
    store: Served, engines: Engines, tmp_path: Path
) -> None:
    store.client.register("french", save_adapter(tmp_path / "v1"), labels={"stage": "live"})
    store.client.register("draft", save_adapter(tmp_path / "v2", seed=2))
    variables = {
        "LOADOUT_STORE": store.running.grpc_address,
        "LOADOUT_CACHE": str(tmp_path / "cache"),
        "LOADOUT_BASE_MODEL": BASE_MODEL,
        "SGLANG_API_KEY": KEY,
        "PYTHONPATH": str(ROOT / "integrations" / "sglang"),
    }
    flags = ["--engine", engines.url, "--filter", "label.stage=live", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        [sys.executable, "-m", "loadout_sglang", *flags], env={**os.environ, **variables}, cwd=ROOT
    ) as program:
        try:
            until(lambda: "default/french@1" in engines.loaded)
        finally:
            program.send_signal(signal.SIGTERM)
        assert program.wait(WAIT_S) == 0
    assert set(engines.loaded) == {"default/french@1"}
