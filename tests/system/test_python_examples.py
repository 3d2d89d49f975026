"""The programs in examples/python against a real system."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loadout import Client
from loadout.demo.adapters import ADAPTERS, MODEL
from loadout.demo.jobs import ADAPTER_JOBS, BASE_MODEL
from loadout.demo.run import MEMORY_FLAGS
from loadout.demo.system import FREE_PORT, Addresses, System, SystemSettings
from tests.support import forks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "python"
ALL = {path.name for path in EXAMPLES.glob("*.py")}
OF_TRAINERS = ("peft", "transformers.trainer")
"""What programs import that train, and a page."""


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    """A system with the demo's model and adapters."""
    settings = SystemSettings(
        MODEL, BASE_MODEL, http_listen=FREE_PORT, inference_flags=MEMORY_FLAGS
    )
    with (
        forks.forked_system(),
        System(settings, tmp_path_factory.mktemp("examples")) as system,
    ):
        with Client(store=system.addresses.store) as client:
            for job in ADAPTER_JOBS:
                client.register(job.name, ADAPTERS / job.name)
        yield system.addresses


@pytest.fixture
def environment(addresses: Addresses) -> dict[str, str]:
    return {
        "LOADOUT_INFERENCE": addresses.inference,
        "LOADOUT_STORE": addresses.store,
        "LOADOUT_HTTP": addresses.http,
        "NO_PROXY": "127.0.0.1",
    }


@pytest.fixture
def start(environment: dict[str, str]) -> Callable[..., subprocess.Popen[str]]:
    def start(name: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(EXAMPLES / name), *arguments],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture
def run(environment: dict[str, str]) -> Callable[..., str]:
    def run(name: str, *arguments: str) -> str:
        done = forks.run(
            *(str(EXAMPLES / name), *arguments),
            environment=environment,
            imports=OF_TRAINERS if name in TRAINERS else (),
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


TRAINERS = ("train_and_register.py", "docs/python.md")
RUNS = {
    "generate.py": ([], ["reverse: tuodaol", "tokens by default/reverse@1", "loadout"]),
    "stream.py": ([], ["upper    LOADOUT", "sort     adlootu"]),
    "register_from_trainer.py": (
        ["trained", str(ADAPTERS / "upper")],
        ["default/trained@1 rank 4", "default/trained@1 answers LOADOUT"],
    ),
    "train_and_register.py": (
        ["tuned", str(MODEL), BASE_MODEL, "{folder}"],
        ["checkpoint-1 is default/tuned@1", "versions of tuned: [4, 3]", "default/tuned@4 answers"],
    ),
    "upload.py": (["uploaded", str(ADAPTERS / "sort")], ["default/uploaded@1 has", "rank 32"]),
    "chat_openai.py": ([], ["'reverse'", "tuodaol"]),
    "pin.py": ([], ["upper is pinned on the device", "bytes freed"]),
    "errors.py": (
        [],
        ["LOADOUT", "no such adapter", "bad argument", "nothing answers at 127.0.0.1:1"],
    ),
}


def test_every_example_is_run() -> None:
    assert {*RUNS, "watch.py"} == ALL
    readme = (EXAMPLES / "README.md").read_text()
    assert [name for name in ALL if f"`{name}`" not in readme] == []


@pytest.mark.parametrize("name", RUNS)
def test_output(run: Callable[..., str], name: str, tmp_path: Path) -> None:
    arguments, expected = RUNS[name]
    out = run(name, *(each.format(folder=tmp_path) for each in arguments))
    assert [each for each in expected if each not in out] == [], out


@pytest.mark.parametrize("name", [name for name, (arguments, _) in RUNS.items() if arguments])
def test_without_arguments_is_a_usage_line(name: str) -> None:
    done = forks.run(str(EXAMPLES / name), imports=OF_TRAINERS if name in TRAINERS else ())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(f"usage: python {name} NAME ")


def test_watch(start: Callable[..., subprocess.Popen[str]], addresses: Addresses) -> None:
    process = start("watch.py")
    try:
        assert process.stdout is not None
        assert "adapters at revision" in process.stdout.readline()
        with Client(store=addresses.store) as client:
            client.register("watched", ADAPTERS / "rot13")
        assert process.stdout.readline() == "registered default/watched@1\n"
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


CHECKPOINTS = ("sort", "rot13", "reverse", "upper")
"""What lies in the folders that a page registers, in its order: the last is used."""
PAGES = {
    "docs/http.md": ["french@1 LOADOUT"],
    "docs/routing.md": ["BONJOUR"],
    "docs/python.md": [
        "default/support@4 deleted: (2,)",
        "\nHELLO\n",
        "\nHELLO default/support@4 stop 6\n",
        "['HELLO', 'WORLD']",
        "ADAPTER_NOT_FOUND",
    ],
}


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_a_page(addresses: Addresses, tmp_path: Path, page: str) -> None:
    """They are one program, in a folder with the trained checkpoints that it names."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)
    program = "\n".join(blocks).replace("127.0.0.1:8000", addresses.http)
    program = re.sub(r"inference-0:\d+[^\"]*", addresses.inference, program)
    program = program.replace("127.0.0.1:7080", addresses.inference)
    program = program.replace("127.0.0.1:7070", addresses.store)
    for job, folder in zip(CHECKPOINTS, re.findall(r"\./out/([\w-]+)", program), strict=False):
        shutil.copytree(ADAPTERS / job, tmp_path / "out" / folder)
    with Client(store=addresses.store) as client:
        client.register("french", ADAPTERS / "upper")
    (tmp_path / "page.py").write_text(program)
    environment = {"NO_PROXY": "127.0.0.1"}
    with contextlib.chdir(tmp_path):
        done = forks.run(
            str(tmp_path / "page.py"),
            environment=environment,
            imports=OF_TRAINERS if page in TRAINERS else (),
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert [each for each in PAGES[page] if each not in done.stdout] == [], done.stdout
