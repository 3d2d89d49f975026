"""The committed model and adapters: ordinary files, small, as their jobs say, and good at them."""

import json

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from loadout.demo import jobs, train

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

MAX_BYTES = 8 * 1000 * 1000
MODEL_FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors"}
LAYERS = train.SHAPE["num_hidden_layers"]

adapter_jobs = pytest.mark.parametrize("job", jobs.ADAPTER_JOBS, ids=lambda job: job.name)


def adapter_folder(job):
    return train.ASSETS / "adapters" / job.name


def file_names(folder):
    return {path.name for path in folder.iterdir()}


def rank_of(spec, module):
    return dict(spec.rank_pattern).get(module, spec.rank)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(train.ASSETS / "model")


@pytest.fixture(scope="module")
def model():
    return train.load_all(train.ASSETS, train.torch.float32)


def test_everything_is_there_and_nothing_else():
    assert file_names(train.ASSETS) == {"model", "adapters"}
    assert file_names(train.ASSETS / "model") == MODEL_FILES
    assert file_names(train.ASSETS / "adapters") == {job.name for job in jobs.ADAPTER_JOBS}
    for job in jobs.ADAPTER_JOBS:
        assert file_names(adapter_folder(job)) == ADAPTER_FILES


def test_size():
    files = [path for path in train.ASSETS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES


@adapter_jobs
def test_adapter_config_is_the_spec(job):
    config = json.loads((adapter_folder(job) / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == jobs.BASE_MODEL
    assert config["r"] == job.adapter.rank
    assert config["lora_alpha"] == job.adapter.alpha
    assert config["target_modules"] == list(job.adapter.target_modules)
    assert config["use_rslora"] == job.adapter.use_rslora
    assert config["rank_pattern"] == dict(job.adapter.rank_pattern)
    assert config["alpha_pattern"] == dict(job.adapter.alpha_pattern)
    layers = job.adapter.layers_to_transform
    assert config["layers_to_transform"] == (list(layers) if layers else None)


@adapter_jobs
def test_adapter_tensors_are_the_spec(job):
    spec = job.adapter
    layers = spec.layers_to_transform or range(LAYERS)
    ranks = {
        (layer, module): rank_of(spec, module) for layer in layers for module in spec.target_modules
    }
    found = {}
    with safe_open(adapter_folder(job) / "adapter_model.safetensors", framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 (safe_open is no mapping)
            *_, layer, _, module, side, _ = key.split(".")
            shape = file.get_slice(key).get_shape()
            found[int(layer), module, side] = shape[0] if side == "lora_A" else shape[1]
    assert found == {
        (*place, side): r for place, r in ranks.items() for side in ("lora_A", "lora_B")
    }


@pytest.mark.parametrize(
    "text", ["hello", "Hello, World 42!", "  two  spaces ", "grüße 日本 🙂", "a.b,c-d'e?\n\t", ""]
)
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(ids) == 1 + len(text.encode())


def test_chat_asks_the_last_user_message(tokenizer):
    messages = [
        {"role": "system", "content": "ignored"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "hello"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.encode(text, add_special_tokens=False) == tokenizer.encode(
        jobs.prompt("hello")
    )


@pytest.mark.parametrize("num_words", [20, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.parametrize("job", jobs.JOBS, ids=lambda job: job.name)
def test_exact_match_on_held_out_words(model, tokenizer, job, num_words):
    words = jobs.held_out(job, num_words, seed=1)
    assert train.exact_match(model, tokenizer, job, words) >= 0.95


def test_the_base_copies_more_than_letters(model, tokenizer):
    words = ["Hello, World 42!", "a", "one two three"]
    assert train.answers(model, tokenizer, jobs.BASE, words) == words
