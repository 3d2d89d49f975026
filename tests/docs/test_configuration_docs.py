"""docs/configuration.md and the example files are what the settings are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from adapter_store.config import StoreSettings
from inference_svc.config import InferenceSettings
from servicekit.settings.describe import describe
from servicekit.settings.load import load_settings
from tools.pages.configuration_docs import EXAMPLES, PATH, ROOT, render, render_example


@pytest.fixture(params=EXAMPLES, ids=lambda path: path.name)
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(ROOT)
    return request.param


def test_the_page_is_up_to_date() -> None:
    assert PATH.read_text() == render(), "run `make docs`"


def test_the_examples_are_up_to_date(example: Path) -> None:
    assert example.read_text() == render_example(EXAMPLES[example]), "run `make docs`"


def test_an_example_has_the_defaults(example: Path) -> None:
    settings = load_settings(EXAMPLES[example], ["--config", str(example)])
    required = {each.name for each in describe(EXAMPLES[example]) if each.is_required}
    assert settings.model_fields_set == {"config", *required}


def test_an_example_without_its_comment_marks(example: Path, tmp_path: Path) -> None:
    """Every line is understood, and those of settings with a default are the default."""
    text = re.sub(r"^#(?=[a-z0-9-]+ = )", "", example.read_text(), flags=re.MULTILINE)
    path = tmp_path / example.name
    path.write_text(text)
    service = EXAMPLES[example]
    changed = load_settings(service, ["--config", str(path)])
    plain = load_settings(service, ["--config", str(example)])
    settings = describe(service)
    assert changed.model_fields_set == {setting.name for setting in settings}
    for setting in settings:
        if setting.default:
            assert getattr(changed, setting.name) == getattr(plain, setting.name)


def test_every_setting_has_a_row() -> None:
    """In its service's part of the page, once."""
    _, store, inference = re.split(
        r"^## (?:Adapter store|Inference service)$", PATH.read_text(), flags=re.M
    )
    for service, part in ((StoreSettings, store), (InferenceSettings, inference)):
        for setting in describe(service):
            assert len(re.findall(rf"^\| \**`{setting.key}`\** \|", part, re.M)) == 1, setting.key


def test_names_of_sizes_say_where_they_are() -> None:
    """In memory, or on disk and in files; the page says so."""
    for service in EXAMPLES.values():
        for setting in describe(service):
            in_memory, of_files = "memory" in setting.name, setting.name.endswith("_bytes")
            is_size = setting.metavar == "SIZE" and not setting.name.endswith("_rate")
            assert (in_memory != of_files) == is_size, setting.name
