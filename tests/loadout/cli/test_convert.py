"""`loadout convert`: what it prints, and how it fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loadout.cli.local.service_code import run_service_code
from loadout.cli.output import CommandFailed
from tests.support import forks

pytestmark = pytest.mark.processes

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def forked_commands() -> Iterator[None]:
    """See `forks.forked_commands`; a test below runs a real process."""
    with forks.forked_commands():
        yield


def write_adapter(folder: Path, factor: float, **config: object) -> Path:
    folder.mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    a, b = torch.ones(2, 1000), torch.arange(2000.0).reshape(1000, 2)
    save_file({f"{name}A.weight": a, f"{name}B.weight": b * factor}, folder / WEIGHTS)
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.usefixtures("forked_commands")
def test_it_says_what_it_made_and_what_that_costs(run, tmp_path: Path) -> None:
    initial = write_adapter(tmp_path / "initial", 1.0)
    fields = {"init_lora_weights": "loftq", "base_model_name_or_path": "acme/tiny"}
    trained = write_adapter(tmp_path / "trained", 1.1, **fields)
    out = tmp_path / "out"
    code, printed, error = run("convert", str(trained), str(out), "--initial", str(initial))
    assert (code, error) == (0, "")
    assert printed.splitlines() == [
        f"{out}: a plain LoRA of acme/tiny",
        "1 modules, rank 2 -> 4, 16.0 kB -> 32.0 kB; training changed 10 % of the initial weights "
        "of loftq",
        "note: it was trained over quantised weights; over plain ones it computes the same except "
        "for the error that LoftQ's rank left",
    ]
    a, b = (tensor for _, tensor in sorted(load_file(out / WEIGHTS).items()))
    wanted = 0.1 * torch.arange(2000.0).reshape(1000, 2) @ torch.ones(2, 1000)
    torch.testing.assert_close(b @ a, wanted)


@pytest.mark.usefixtures("forked_commands")
def test_a_refusal_is_one_line(run, tmp_path: Path) -> None:
    trained = write_adapter(tmp_path / "trained", 1.0, init_lora_weights="corda")
    code, printed, error = run("convert", str(trained), str(tmp_path / "out"))
    assert (code, printed) == (1, "")
    assert error.startswith(
        "loadout: init_lora_weights='corda' begins with the effect of its data on"
    )
    assert len(error.splitlines()) == 1
    code, _, error = run("convert", str(tmp_path), str(tmp_path / "out"))
    assert code == 1
    assert "adapter_config.json" in error


def test_progress_is_shown_while_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_service_code("tests.loadout.cli.slow_command") == "made"
    assert capsys.readouterr().err == "1 of 2 modules: q_proj\n"
    with pytest.raises(CommandFailed, match=r"^the last line$"):
        run_service_code("tests.loadout.cli.slow_command", "fail")
    assert capsys.readouterr().err == "1 of 2 modules: q_proj\n"
