import subprocess
import sys
from pathlib import Path

import pytest

from inference_svc.config import (
    InferenceSettings,
    Machine,
    ModelFacts,
    padding_pages,
    parse_command_line,
    resolve,
)
from servicekit.settings import split_address

MIB = 1 << 20
MODEL = ModelFacts("bfloat16", max_position_embeddings=4096, kv_elements_per_token=1024)
CPU, GPU = Machine(has_cuda=False), Machine(has_cuda=True, free_bytes=1000 * MIB)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("LOADOUT_"):
            monkeypatch.delenv(name)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def parse(model: Path, *args: str) -> InferenceSettings:
    return parse_command_line(["--model", str(model), *args])


def test_command_line_wins_over_environment(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADOUT_INFERENCE_MAX_LORAS", "3")
    monkeypatch.setenv("LOADOUT_INFERENCE_ALIASES", "a, b")
    assert parse(model).max_loras == 3
    config = parse(model, "--max-loras", "5", "--kv-memory", "12MiB", "--no-prefix-cache")
    assert (config.max_loras, config.kv_memory, config.prefix_cache) == (5, 12 * MIB, False)
    assert config.base_model_names == ("my-model", "a", "b")
    assert parse(model, "--base-model", "m", "--aliases", "n,m").base_model_names == ("m", "n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--kv-memory", "12XB"], "--kv-memory: could not interpret byte unit"),
        (["--listen", "7080"], "--listen: '7080' is not host:port"),
        (["--listen", "h:70000"], "--listen: 'h:70000' is not host:port"),
        (["--max-loras", "0"], "--max-loras: Input should be greater than or equal to 1"),
        (["--dtype", "int8"], "--dtype"),
        (["--model", "/nowhere"], "--model: /nowhere holds no config.json"),
        (["--max-batch-tokens", "63"], "--max-sequences 64 exceeds --max-batch-tokens 63"),
    ],
)
def test_mistakes_end_in_one_line_that_names_the_flag(
    model: Path, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(model, *args)
    said = f"{caught.value.code} {capsys.readouterr().err}"
    assert message in said
    assert "Traceback" not in said


def test_auto_follows_the_model_and_the_machine(model: Path) -> None:
    config = resolve(parse(model), CPU, MODEL)
    assert (config.device, config.dtype, config.max_model_len) == ("cpu", "bfloat16", 4096)
    assert (config.kv_memory, config.host_memory) == (512 * MIB, 0)
    assert resolve(parse(model, "--host-memory", "7MiB"), CPU, MODEL).host_memory == 7 * MIB
    config = resolve(parse(model, "--dtype", "float32"), GPU, MODEL)
    assert (config.device, config.dtype) == ("cuda", "float32")
    assert (config.kv_memory, config.host_memory) == (900 * MIB - 256 * MIB, 1024 * MIB)
    assert config.max_batch_tokens == 2048
    assert resolve(parse(model, "--device", "cpu"), GPU, MODEL).device == "cpu"
    assert resolve(parse(model), CPU, MODEL).max_batch_tokens == 512
    assert resolve(parse(model, "--max-sequences", "600"), CPU, MODEL).max_batch_tokens == 600
    # Resolving is idempotent: nothing is left to decide.
    assert resolve(config, GPU, MODEL) == config


def test_context_is_as_long_as_the_pages_allow(model: Path) -> None:
    config = resolve(parse(model, "--kv-memory", "1MiB"), CPU, MODEL)
    assert config.max_model_len == MIB // (1024 * 2)
    assert resolve(parse(model, "--max-model-len", "100"), CPU, MODEL).max_model_len == 100


def test_on_a_device_one_page_is_of_no_sequence(model: Path) -> None:
    """What is resolved is what the engine can hold beside padding's page."""
    config = resolve(parse(model, "--kv-memory", "1MiB"), GPU, MODEL)
    assert config.max_model_len == 512 - config.page_size * padding_pages("cuda")
    assert padding_pages("cuda") > padding_pages("cpu") == 0
    assert resolve(config, GPU, MODEL) == config


@pytest.mark.parametrize(
    ("args", "machine", "message"),
    [
        (["--device", "cuda"], CPU, "device is cuda, and there is none"),
        (["--max-model-len", "4097"], CPU, "exceeds the model's 4096"),
        (["--max-model-len", "4096", "--kv-memory", "1MiB"], CPU, "holds 512 tokens"),
        (["--kv-memory", "1KiB"], CPU, "holds 0 tokens"),
        (["--max-model-len", "512", "--kv-memory", "1MiB"], GPU, "holds 496 tokens"),
        (["--kv-memory", "1KiB"], GPU, "holds 0 tokens"),
        (["--adapter-memory", "2GiB"], GPU, "leaves no room for pages"),
    ],
)
def test_what_is_not_there_is_refused(
    model: Path, args: list[str], machine: Machine, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(parse(model, *args), machine, MODEL)


def test_addresses() -> None:
    assert split_address("[::1]:80") == ("::1", 80)
    assert split_address("0.0.0.0:0") == ("0.0.0.0", 0)


def test_help_names_every_setting_and_loads_no_torch() -> None:
    code = "import sys; sys.argv[1:] = ['--help']\nimport inference_svc.__main__ as m\n"
    code += "try: m.main()\nexcept SystemExit as e: assert e.code == 0\n"
    code += "assert 'torch' not in sys.modules and 'grpc' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in InferenceSettings.model_fields:
        assert f"--{name.replace('_', '-')}" in done.stdout
