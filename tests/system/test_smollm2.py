"""A real model with real adapters: the answers of transformers and PEFT, chats, and streams."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
import safetensors.torch
import torch

from loadout.cli.__main__ import main
from loadout.types import ChatMessage, FinishReason
from tests.support import forks
from tests.support.models import smollm2
from tests.support.pairs import PATHS
from tests.system.engines import Running
from tests.system.services import Services

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MEMORY = {"kv_bytes": 96 << 20, "arena_bytes": 32 << 20}


@pytest.mark.parametrize(
    ("path", "every"),
    [
        ("native", 10),
        pytest.param("native", 1, marks=pytest.mark.long),
        pytest.param("torch", 1, marks=pytest.mark.long),
    ],
)
def test_greedy_answers_are_those_of_transformers_and_peft(
    path: str, every: int, start: Callable[..., Running]
) -> None:
    """Of the base model and three adapters in one batch, to twenty questions, or to each tenth."""
    running = start(smollm2.zoo(), native_kernels=PATHS[path], **MEMORY)
    expected = smollm2.read_answers()
    cases = [(name, each) for name in expected for each in smollm2.QUESTIONS[::every]]
    for name, question in cases:
        prompt = smollm2.prompt_ids(question)
        running.submit(f"{name} {question}", prompt, name, max_tokens=smollm2.NUM_TOKENS)
    wrong = {}
    for name, question in cases:
        tokens, _ = running.result(f"{name} {question}")
        answer = expected[name][question]
        if tokens[: len(answer)] != answer:
            wrong[name, question] = smollm2.tokenizer().decode(tokens)
    assert wrong == {}
    assert sum(len(expected[name][question]) for name, question in cases) > 10 * len(cases)
    running.check_idle()


@pytest.mark.long
def test_the_answers_on_disk_are_those_of_transformers_and_peft() -> None:
    assert smollm2.compute_answers() == smollm2.read_answers()


def test_answers_show_what_the_adapters_learned() -> None:
    """Otherwise equal tokens would prove little."""
    answers = smollm2.read_answers()
    texts = {
        name: [smollm2.tokenizer().decode(ids, skip_special_tokens=True) for ids in each.values()]
        for name, each in answers.items()
    }
    assert sum(text == text.upper() for text in texts["capitals"]) >= 15
    assert sum(text.startswith('{"answer": "') for text in texts["json"]) >= 15
    assert sum("Arr!" in text for text in texts["pirate"]) >= 15
    assert not any("Arr!" in text or text.startswith("{") for text in texts[""])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """The GGUF file, as the demo serves it."""
    flags = ("--http", "127.0.0.1:0", "--dtype", "float32", "--kv-memory", "64MiB")
    flags += ("--adapter-memory", "32MiB")
    folder = tmp_path_factory.mktemp("smollm2")
    with Services(smollm2.gguf_zoo(), folder, inference_flags=flags) as made:
        for name, path in smollm2.ADAPTERS.items():
            made.client.register(name, path, base_model="llama")
        yield made
        made.check_exit_codes()


CHATS = {
    "a system prompt": (("Who are you?",), "You are a parrot."),
    "several turns": (("What is 2 plus 2?", "2 + 2 = 4", "And 3 plus 3?"), ""),
    "letters of several bytes": (("Translate to English: 北京 😀 naïve",), ""),
}


@pytest.mark.parametrize(("contents", "system"), CHATS.values(), ids=CHATS)
def test_chats_have_the_tokens_that_transformers_renders(
    contents: tuple[str, ...], system: str, served: Services
) -> None:
    roles = ("user", "assistant") * 2
    messages = [
        ChatMessage(role=role, content=each) for role, each in zip(roles, contents, strict=False)
    ]
    if system:
        messages.insert(0, ChatMessage(role="system", content=system))
    answer = served.client.complete(messages, temperature=0, max_tokens=4, echo=True)
    rendered = smollm2.prompt_ids(*contents, system=system)
    assert list(answer.token_ids[: len(rendered)]) == rendered


def test_an_answer_stops_at_the_end_of_its_turn(served: Services) -> None:
    with openai.OpenAI(base_url=f"http://{served.http_address}/v1", api_key="none") as client:
        for model in ("llama", "capitals"):
            [choice] = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "What is the capital of France?"}],
                temperature=0,
                max_tokens=64,
            ).choices
            assert choice.finish_reason == "stop"
            assert choice.message.content is not None
            assert choice.message.content.casefold() == "the capital of france is paris."


@pytest.mark.parametrize(
    "text", ["😀🎉😀🎉😀🎉😀🎉😀🎉😀🎉", "北京很大。北京很大。北京很大。北京很大。"]
)
def test_letters_of_several_tokens_are_streamed_whole(text: str, served: Services) -> None:
    """The model goes on with the pattern. Its tokens are pieces of letters."""
    chunks = list(served.client.generate(text, temperature=0, max_tokens=24, echo=True))
    assert len(chunks) > 3
    joined = "".join(chunk.text for chunk in chunks)
    ids = [token for chunk in chunks for token in chunk.token_ids]
    assert joined.startswith(text)
    assert len(joined) > len(text) + 3
    assert joined == smollm2.tokenizer().decode(ids)
    assert all("�" not in chunk.text for chunk in chunks[:-1])
    assert chunks[-1].finish_reason is FinishReason.LENGTH


def test_the_chat_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loadout").symlink_to(smollm2.gguf_path().parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with forks.forked_system():
        flags = ["--question", "What is the capital of France?", "--work-dir", str(tmp_path / "w")]
        assert main(["demo", "--chat", *flags]) == 0
    said = " ".join(capfd.readouterr().out.split())
    for text in ("base model", "Paris", "PARIS", '{"answer":', "Arr!", "first token"):
        assert text in said
    assert "all services exited with 0" in said


@pytest.mark.long
def test_the_adapters_can_be_trained_again(tmp_path: Path) -> None:
    """For two steps, as examples/smollm2/README.md says."""
    program = ROOT / "examples" / "smollm2" / "train.py"
    trial = ["--questions", "4", "--steps", "2"]
    subprocess.run(
        [sys.executable, str(program), str(smollm2.gguf_path()), "--out", str(tmp_path), *trial],
        check=True,
    )
    for name, shipped in smollm2.ADAPTERS.items():
        assert main(["check", str(tmp_path / name), "--model", str(smollm2.gguf_path())]) == 0
        ours, theirs = (
            safetensors.torch.load_file(folder / "adapter_model.safetensors")
            for folder in (tmp_path / name, shipped)
        )
        assert {key: (each.shape, each.dtype) for key, each in ours.items()} == {
            key: (each.shape, each.dtype) for key, each in theirs.items()
        }


@pytest.mark.long
def test_verify_finds_faults_of_a_real_adapter(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In bf16: rsLoRA without its factor, one lost layer of thirty, and another base model."""
    trained = smollm2.ADAPTERS["pirate"]
    flags = ("--dtype", "bfloat16", "--kv-memory", "64MiB", "--adapter-memory", "32MiB")
    with Services(smollm2.zoo(), tmp_path, inference_flags=flags) as served:

        def verify(name: str, model: Path) -> int:
            address = ["--inference", served.inference_address]
            return main(
                ["verify", name, *address, "--reference", str(trained), "--model", str(model)]
            )

        served.client.register("trained", trained, base_model="llama")
        assert verify("trained", smollm2.folder()) == 0
        for fault in (lose_factor, lose_layer):
            folder = shutil.copytree(trained, tmp_path / fault.__name__)
            fault(folder)
            served.client.register(fault.__name__, folder, base_model="llama")
            assert verify(fault.__name__, smollm2.folder()) == 1
            assert "applies another adapter" in capfd.readouterr().err
        other = shutil.copytree(smollm2.folder(), tmp_path / "other")
        weights = safetensors.torch.load_file(other / "model.safetensors")
        generator = torch.Generator().manual_seed(0)
        for name, value in weights.items():
            if name.endswith("proj.weight"):  # as another quantisation has them
                value *= 1 + 0.05 * torch.randn(value.shape, generator=generator)
        safetensors.torch.save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
        assert verify("trained", other) == 1
        assert "runs another base model" in capfd.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verify_reads_a_gguf_file(
    dtype: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained, path = smollm2.ADAPTERS["pirate"], smollm2.gguf_path()
    flags = ("--dtype", dtype, "--kv-memory", "64MiB", "--adapter-memory", "32MiB")
    with Services(smollm2.gguf_zoo(), tmp_path, inference_flags=flags) as served:
        served.client.register("trained", trained, base_model="llama")
        command = ["verify", "trained", "--inference", served.inference_address]
        command += ["--reference", str(trained), "--model"]
        (tmp_path / "alone").mkdir()
        (tmp_path / "alone" / path.name).symlink_to(path)
        assert main([*command, str(tmp_path / "alone")]) == 0, capfd.readouterr().err
        if dtype == "float32":
            lose_layer(folder := shutil.copytree(trained, tmp_path / "lost"))
            served.client.register("trained", folder, base_model="llama")
            assert main([*command, str(path)]) == 1
            assert "applies another adapter" in capfd.readouterr().err


def lose_factor(folder: Path) -> None:
    path = folder / "adapter_config.json"
    path.write_text(path.read_text().replace('"use_rslora": true', '"use_rslora": false'))


def lose_layer(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(path)
    kept = {name: value for name, value in tensors.items() if ".layers.15." not in name}
    assert len(kept) < len(tensors)
    safetensors.torch.save_file(kept, path, metadata={"format": "pt"})
