"""What pip is configured with reaches the build of an image."""

from __future__ import annotations

import pytest

from tools.containers import pip_sources


@pytest.mark.processes
def test_folders_are_mounted_and_named_as_the_build_sees_them(tmp_path, monkeypatch):
    """With values of several lines, as pip.conf has them, and one that a variable repeats."""
    monkeypatch.setattr(pip_sources, "FOLDER", tmp_path)
    config = tmp_path / "configured"
    config.write_text(
        "[global]\n"
        "index-url = https://packages.example/simple\n"
        "extra-index-url =\n    file:///packages/simple\n    https://more.example/simple\n"
        "find-links =\n    /wheels\n    /older\n"
    )
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    options = pip_sources.build_options(["torch==1.0+cpu"])
    written = (tmp_path / "pip.conf").read_text()
    values = dict(line.split(" = ") for line in written.splitlines() if " = " in line)
    # Beside what this machine itself is configured with.
    assert {"/machine/wheels", "/machine/older"} <= set(values["find-links"].split())
    assert values["find-links"].split().count("/machine/wheels") == 1
    assert "https://packages.example/simple" in values["index-url"].split()
    extra = set(values["extra-index-url"].split())
    assert {"file:///machine/packages/simple", "https://more.example/simple"} <= extra
    for folder in ("/wheels", "/older", "/packages"):
        assert f"{folder}:/machine{folder}:ro" in options
    assert f"{tmp_path}/pip-constraints.txt:{values['constraint']}:ro" in options
    assert (tmp_path / "pip-constraints.txt").read_text() == "torch==1.0+cpu"


@pytest.mark.parametrize("place", ["https://packages.example/simple", "git+file:///x"])
def test_what_is_not_of_this_machine_stays(place):
    assert pip_sources._relocated(place) == place
