"""Adapters in all the ways that people make them: registered with which words, or refused with
which; where they are served, the greedy tokens are PEFT's."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_store.checkpoint.reading.files import CheckpointLimits
from adapter_store.images.plan.check import Server, check_folder
from loadout import errors
from loadout.cli.__main__ import main
from tests.support.models.trained import (
    PREFIX,
    WEIGHTS,
    Trainer,
    as_mlx,
    as_torchtune,
    edited,
    renamed,
)
from tests.support.models.zoo import ALL, AdapterSpec, Zoo, make_zoo
from tests.support.servers.hub_cache import SNAPSHOT, linked
from tests.system.adapter_makers import (
    added_tokens,
    another_row,
    another_template,
    beside,
    checkpoint,
    diverged,
    ia3,
    in_bfloat16,
    lora,
    named,
    pissa_converted,
    pissa_converted_by_loadout,
    run_folder,
    several,
    split,
    stripped,
    tinkers,
    trained,
    unfinished,
    whole,
    whole_model,
    with_fields,
)
from tests.system.services import Services
from tools.conformance import server_of

PROMPT = [ord(char) for char in "the quick brown fox"]
NUM_TOKENS = 12
MAX_RANK = 16
ALLOWED_KEY = "trainer_note"
STORE_FLAGS = ("--allow-config-keys", ALLOWED_KEY)
INFERENCE_FLAGS = (
    *("--aliases", "acme/tiny", "--max-rank", str(MAX_RANK)),
    *("--http", "127.0.0.1:0"),
)


@dataclass(frozen=True)
class Way:
    """A way of making a folder. `says` is what `loadout register` prints, in this order, or
    `/v1/load_lora_adapter` if it is registered `over_http`. It is served as the name `ref`, unless
    it is `refused` with this error, or registered without being `servable`. PEFT's tokens are those
    of the folder, or of `oracle` beside it."""

    make: Callable[[Trainer], Path | str]
    says: tuple[str, ...] = ("servable by layout",)
    ref: str = ""
    refused: type[errors.LoadoutError] | None = None
    servable: bool = True
    over_http: bool = False
    oracle: str | None = None


def refused(make: Callable[[Trainer], Path | str], *says: str, ref: str = "") -> Way:
    return Way(make, says, ref, refused=errors.InvalidArgument)


def unservable(make: Callable[[Trainer], Path | str], *says: str) -> Way:
    return Way(make, says, servable=False)


BESIDE = "note: the adapter's tokenizer and chat template are used for its requests; "
SAME = f"{BESIDE}the base model in "
ADDED = f"{BESIDE}compared with the base model's in "
WAYS = {
    # served
    "plain, the very path that is served": Way(lora(), ("base model llama: ", "servable by ")),
    "rslora": Way(lora(use_rslora=True)),
    "all-linear": Way(lora(target_modules="all-linear")),
    "all, with patterns": Way(
        lora(target_modules=ALL, rank_pattern={"q_proj": 7}, alpha_pattern={"layers.1.mlp.*": 3})
    ),
    "parameters that are weights of linear layers": Way(
        lora(target_parameters=["self_attn.k_proj.weight", "mlp.down_proj.weight"])
    ),
    "all but some modules": Way(
        lora(target_modules="all-linear", exclude_modules=["down_proj"], lora_dropout=0.1)
    ),
    "some layers": Way(lora(target_modules=["down_proj"], layers_to_transform=[1])),
    "a regular expression": Way(lora(target_modules=r".*self_attn\.[qk]_proj")),
    "bfloat16": Way(in_bfloat16),
    "gaussian": Way(lora(init_lora_weights="gaussian")),
    "checkpoint with optimizer and tokenizer": Way(
        checkpoint(), (SAME, " has the same tokens and chat template\n", "servable by ")
    ),
    "another chat template": Way(
        checkpoint(another_template),
        (
            f"{BESIDE}chats are formatted differently from the base model's; ",
            "servable by ",
        ),
    ),
    "sharded": Way(split, oracle="whole"),
    "links of a hub's cache": Way(lambda trainer: linked(trainer.lora(), trainer.folder / "hub")),
    "links of a hub's cache that the store reads": Way(
        lambda trainer: f"file://{linked(trainer.lora(), trainer.folder / 'hub')}",
        oracle=f"hub/{SNAPSHOT}",
    ),
    "several in one folder, one at its top": Way(several("default", "other")),
    "a local path of another machine": Way(
        named("/mnt/nfs/models/llama"), ("base model llama: ", "'/mnt/nfs/models/llama'\n")
    ),
    "an alias": Way(named("acme/tiny"), ("base model llama: ", "'acme/tiny'\n", "servable by ")),
    "a hub's name": Way(named("meta/llama"), ("base model llama: ", "'meta/llama'\n")),
    "a relative path": Way(
        named("./out/base"),
        (
            "base model llama: the only one that servers have registered; the adapter's config "
            "names './out/base': make sure that it is the same model\n",
        ),
    ),
    "another organisation's copy": Way(
        named("unsloth/tiny"),
        (
            "base model llama: registered by a server, and the adapter's config names "
            "'unsloth/tiny'\n",
            "servable by ",
        ),
    ),
    "a quantized copy": Way(
        named("unsloth/tiny-bnb-4bit"),
        (
            *("base model llama: registered by a server, ", "'unsloth/tiny-bnb-4bit'\n"),
            *("servable by ", "; note: trained on the nf4 form of the base model, served on plain"),
        ),
    ),
    "no base model": Way(named(None), ("base model llama: the only one",)),
    "capitals in the name": Way(lora(), ("default/French-LoRA@1 rank 4",), "French-LoRA"),
    "a tenant's name": Way(lora(), ("acme/French@1 rank 4",), "acme/French"),
    "embedding and head, without base weights": Way(
        lambda trainer: trainer.save(
            trainer.adapt(target_modules=["embed_tokens", "lm_head"]), save_embedding_layers=False
        )
    ),
    "default save of embedding and head, stripped": Way(stripped, oracle="whole"),
    "default save of embedding and head": Way(
        lora(target_modules=["q_proj", "embed_tokens", "lm_head"])
    ),
    "embedding and head saved along": Way(
        lambda trainer: trainer.save(trainer.adapt(), save_embedding_layers=True)
    ),
    "modules_to_save as the base has them": Way(
        lora(modules_to_save=["lm_head", "input_layernorm", "model.norm"])
    ),
    "biases as the base has them": Way(lora(bias="all")),
    "dora": Way(lora(use_dora=True)),
    "a bias of B": Way(lora(lora_bias=True)),
    "a row of the head saved along differs": Way(another_row),
    "added tokens": Way(
        lambda trainer: trainer.save(trainer.adapt(num_added=2, target_modules=["q_proj"]))
    ),
    "trained biases of adapted modules": Way(trained("bias", bias="lora_only")),
    "trained modules_to_save": Way(
        trained("modules_to_save", modules_to_save=["lm_head", "input_layernorm", "model.norm"])
    ),
    "trained tokens": Way(trained("trainable_tokens", trainable_token_indices=[5, 6])),
    "pissa, converted": Way(pissa_converted, ("rank 8 ", "servable by ")),
    "pissa, converted by loadout": Way(
        pissa_converted_by_loadout, ("rank 8 ", "servable by "), oracle="end"
    ),
    "an unknown key that the operator allows": Way(
        with_fields(trainer_note="v3"),
        ("unknown config keys that the operator allows: trainer_note\n",),
    ),
    "over HTTP, with an unknown key that the operator allows": Way(
        with_fields(trainer_note="v3", base_model_name_or_path="acme/tiny"),
        (
            "added successfully. Its base model is llama: registered by a server, and the "
            "adapter's config names 'acme/tiny'. Keys of its config that are not known, and "
            "allowed by the operator: trainer_note.",
        ),
        over_http=True,
    ),
    "MLX-LM's": Way(
        lambda trainer: as_mlx(whole(trainer, "lm_head"), trainer.folder / "mlx"),
        ("rank 4 ", "base model llama: ", "servable by "),
        oracle="whole",
    ),
    "torchtune's": Way(lambda trainer: as_torchtune(trainer, trainer.lora())),
    "Tinker's": Way(tinkers, oracle="whole"),
    "names without PEFT's prefix": Way(
        lambda trainer: renamed(whole(trainer), trainer.folder / "bare", PREFIX, ""),
        oracle="whole",
    ),
    "names of a compiled model (Soup#335)": Way(
        lambda trainer: renamed(
            whole(trainer), trainer.folder / "c", PREFIX, f"_orig_mod.{PREFIX}"
        ),
        oracle="whole",
    ),
    "a key that Cloudflare asks for": Way(with_fields(model_type="mistral"), ("servable by ",)),
    # registered, and no server can serve it
    "rank above the server's limit": unservable(
        lora(r=2 * MAX_RANK),
        "not servable by layout ",
        "rank 32 is above this server's limit 16 (--max-rank)",
    ),
    "another model's": unservable(
        named("other/model"),
        "base model other/model: as the adapter's config names it; servers have registered ",
        "'llama': if it is one of them, name it (loadout register --base-model NAME)\n",
        "no server serves base model other/model\n",
    ),
    "added tokens, adapted": unservable(
        added_tokens(["embed_tokens"], save_embedding_layers=False),
        ADDED,
        " it adds 2 tokens ('<tool>', '</tool>')",
        "not servable by layout ",
        "has 130 in_features, model.embed_tokens has 128: tokens were added",
    ),
    # refused
    "run folder": refused(
        run_folder,
        "adapter_config.json does not exist, but below it are "
        "checkpoint-1500, checkpoint-1000, checkpoint-500; to register the latest: "
        "loadout register ",
        "/checkpoint-1500\n",
    ),
    "run folder that the store reads": refused(
        lambda trainer: f"file://{run_folder(trainer)}",
        "adapter_config.json is missing; below it are checkpoint-1500, checkpoint-1000, "
        "checkpoint-500: register one of them, such as file://",
        "/checkpoint-1500 (FILE_MISSING)\n",
    ),
    "several in one folder, none at its top": refused(
        several("french", "german"),
        "adapter_config.json does not exist, but below it are french, german; to register one: "
        "loadout register ",
        "/french\n",
    ),
    "a whole model": refused(
        whole_model, "this is a whole model; register the adapter that PEFT saves\n"
    ),
    "pissa": refused(
        lora(init_lora_weights="pissa"),
        "init_lora_weights='pissa' is not supported: it changes the base weights, ",
        "`loadout convert IN OUT` makes a plain LoRA of it",
    ),
    "no LoRA": refused(ia3, "peft_type='IA3': only LORA is supported"),
    "an unknown key": refused(
        with_fields(use_something_new=True),
        "unknown key 'use_something_new' with value True",
        "--allow-config-keys",
    ),
    "rows of added tokens in a file of their own": refused(
        beside("new_embeddings.safetensors"),
        "new_embeddings.safetensors would not be applied (rows of added tokens, which are",
    ),
    "rows of added tokens that the store sees": refused(
        beside("new_embeddings.safetensors", is_uri=True),
        "new_embeddings.safetensors: rows of added tokens, which are not supported: nothing would "
        "apply it",
    ),
    "DoRA of MLX-LM": refused(
        lambda trainer: edited(as_mlx(whole(trainer), trainer.folder / "d"), fine_tune_type="dora"),
        "fine_tune_type='dora': DoRA rescales the base weight",
    ),
    "a pickle": refused(
        lambda trainer: trainer.save(trainer.adapt(), safe_serialization=False),
        "adapter_model.bin is a pickle, which can run code when it is read; save the adapter as "
        "adapter_model.safetensors, or have the store's operator allow it with "
        "--allow-pickle-files",
    ),
    "an alpha of 0 (surogate#173)": refused(
        with_fields(lora_alpha=0), "lora_alpha=0: A and B of ", "would change nothing"
    ),
    "weights cut off": refused(
        unfinished,
        "adapter_model.safetensors: ",
        ": ends at byte ",
        " of a file of ",
        "(truncated?) (TENSOR_OUT_OF_FILE)\n",
    ),
    "weights that are not numbers": refused(diverged, "lora_B.weight", "finite"),
    "capitals in the tenant": refused(
        lora(),
        "tenant 'Acme' is not of the form",
        "the part before a slash is the tenant",
        ref="Acme/a",
    ),
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """A model with a head of its own."""
    unused = [AdapterSpec("unused", 1, ["q_proj"])]
    return make_zoo("qwen2", tmp_path_factory.mktemp("trained"), unused)


@pytest.fixture(scope="module")
def services(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    folder = tmp_path_factory.mktemp("services")
    with Services(zoo, folder, STORE_FLAGS, INFERENCE_FLAGS) as made:
        yield made
        made.check_exit_codes()


@pytest.fixture(scope="module")
def trainer(zoo: Zoo) -> Trainer:
    return Trainer.load(zoo.model_dir)


@pytest.fixture(scope="module")
def base_tokens(trainer: Trainer) -> list[int]:
    return trainer.base_tokens(PROMPT, NUM_TOKENS)


@pytest.fixture(scope="module")
def server(zoo: Zoo, services: Services) -> Server:
    """What the inference service says of itself, as `loadout check --model` learns it."""
    return server_of(zoo.model_dir, "--max-rank", str(MAX_RANK))


@pytest.fixture
def register(services: Services, capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs `loadout register`; (exit code, all that it prints)."""

    def run(name: str, source: str, *options: str) -> tuple[int, str]:
        capfd.readouterr()
        code = main(["register", name, source, *options, "--store", services.store_address])
        printed = capfd.readouterr()
        return code, printed.err + printed.out

    return run


def load_over_http(services: Services, name: str, source: str) -> tuple[int, str]:
    """Registers with `/v1/load_lora_adapter`; (0 or 1, the answer)."""
    address = json.loads((services.folder / "inference.json").read_text())["http"]
    body = {"lora_name": name, "lora_path": source}
    answer = httpx2.post(f"http://{address}/v1/load_lora_adapter", json=body, timeout=60)
    return int(answer.status_code != 200), answer.text


def check_words(printed: str, says: tuple[str, ...]) -> None:
    """Requires all of them, in this order."""
    start = 0
    for each in says:
        found = printed.find(each, start)
        assert found >= 0, f"{each!r} is missing in: {printed}"
        start = found + len(each)


def check_verdict(way: Way, source: str, server: Server) -> None:
    """Requires `loadout check` to say of a folder what the services do."""
    if way.refused is not None and (way.ref or not Path(source).is_dir()):
        return  # it is not the folder that is refused
    limits = CheckpointLimits(allowed_config_keys=frozenset([ALLOWED_KEY]))
    report = check_folder(Path(source.removeprefix("file://")), limits, server)
    assert (report.refusal is not None) == (way.refused is not None), report.refusal
    if report.refusal is None:
        assert report.server is not None
        is_applied = way.servable or way is WAYS["another model's"]  # whose weights fit
        assert (not report.server.refusals) == is_applied, report.server.refusals


@pytest.mark.parametrize("way", WAYS)
def test_a_way_of_making_an_adapter(
    way: str,
    services: Services,
    trainer: Trainer,
    base_tokens: list[int],
    register: Callable[..., Any],
    server: Server,
) -> None:
    expected = WAYS[way]
    slug = re.sub(r"\W+", "-", way)
    torch.manual_seed(list(WAYS).index(way))
    own = replace(trainer, folder=services.sources / slug)
    source, name = str(expected.make(own)), expected.ref or slug
    if expected.over_http:
        code, printed = load_over_http(services, name, source)
    else:
        code, printed = register(name, source)
    check_words(printed, expected.says)
    check_verdict(expected, source, server)
    assert code == (1 if expected.refused else 0), printed
    if expected.refused is not None:
        with pytest.raises(expected.refused) as caught:
            services.client.register(name, source)
        assert str(caught.value) in printed
        return
    revision = 0  # the server itself knows what it has loaded
    if not expected.over_http:
        revision = int(re.search(r" at revision (\d+)\n", printed)[1])  # type: ignore[index]

    def generate() -> list[int]:
        options = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
        done = services.client.complete(PROMPT, adapter=name, min_revision=revision, **options)
        return list(done.token_ids)

    if not expected.servable:
        with pytest.raises(errors.FailedPrecondition):
            generate()
        return
    tokens = generate()
    oracle = Path(source) if expected.oracle is None else own.folder / expected.oracle
    assert tokens == own.tokens_of(oracle, PROMPT, NUM_TOKENS, guess=tokens)
    assert tokens != base_tokens


TIED: dict[str, dict[str, Any]] = {
    "saved-tied": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "adapted-tied": {"target_modules": ["embed_tokens", "lm_head"]},
}


def check_tied_halves(folder: Path, way: str) -> None:
    """Requires one weight for both, and makes it another than the base's."""
    tensors = load_file(folder / WEIGHTS)
    names = ("model.embed_tokens", "lm_head")
    if way == "adapted-tied":
        embedding, head = (
            tensors[PREFIX + name]
            for name in ("model.embed_tokens.lora_embedding_A", "lm_head.lora_B.weight")
        )
        assert embedding.T.equal(head)
        return
    embedding, head = (tensors[f"{PREFIX}{name}.weight"] for name in names)
    assert embedding.equal(head)
    changed = embedding + 0.3 * torch.randn_like(embedding)
    save_file(
        tensors | {f"{PREFIX}{name}.weight": changed.clone() for name in names}, folder / WEIGHTS
    )


def test_adapters_of_a_tied_base(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Trainers load a base of bfloat16 in float32, and save its copies so."""
    zoo = make_zoo("llama", tmp_path_factory.mktemp("tied"), [AdapterSpec("unused", 1, ["q_proj"])])
    path = zoo.model_dir / "model.safetensors"
    save_file({name: each.bfloat16() for name, each in load_file(path).items()}, path)
    trainer = Trainer.load(zoo.model_dir, torch.float32)
    torch.manual_seed(0)
    flags = (*INFERENCE_FLAGS, "--dtype", "float32")
    with Services(zoo, tmp_path_factory.mktemp("wider"), (), flags) as services:
        own = replace(trainer, folder=services.sources)
        targets = ["q_proj", "embed_tokens", "lm_head"]
        folder = own.save(own.adapt(target_modules=targets), "wider")
        saved = load_file(folder / WEIGHTS)[f"{PREFIX}model.embed_tokens.base_layer.weight"]
        assert saved.dtype is torch.float32
        revision = services.client.register("wider", str(folder)).revision
        options = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
        done = services.client.complete(PROMPT, adapter="wider", min_revision=revision, **options)
        assert list(done.token_ids) == own.tokens_of(folder, PROMPT, NUM_TOKENS)
        assert list(done.token_ids) != own.base_tokens(PROMPT, NUM_TOKENS)
        differs = another_row(replace(own, folder=folder / "row"))
        services.client.register("differs", str(differs))
        done = services.client.complete(PROMPT, adapter="differs", **options)
        assert list(done.token_ids) == own.tokens_of(differs, PROMPT, NUM_TOKENS)
        for way, tied in TIED.items():  # peft#2879, unsloth#9331
            folder = own.save(own.adapt(ensure_weight_tying=True, **tied), way)
            check_tied_halves(folder, way)
            services.client.register(way, str(folder))
            done = services.client.complete(PROMPT, adapter=way, **options)
            assert list(done.token_ids) == own.tokens_of(folder, PROMPT, NUM_TOKENS)
            assert list(done.token_ids) != own.base_tokens(PROMPT, NUM_TOKENS)


def test_the_suggested_command_registers_the_latest_checkpoint(
    services: Services, trainer: Trainer, register: Callable[..., Any]
) -> None:
    folder = run_folder(replace(trainer, folder=services.sources / "a run"))
    _, printed = register("latest", str(folder))
    command = shlex.split(printed.partition("the latest: ")[2])
    assert command == ["loadout", "register", "latest", str(folder / "checkpoint-1500")]
    assert register(*command[2:])[0] == 0
