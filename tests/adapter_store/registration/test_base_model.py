"""Which base model an adapter is recorded for, by what its config names and what is known."""

from __future__ import annotations

import pytest

from adapter_store.catalog.tables.base_models import KnownBaseModels
from adapter_store.core import BaseModelSource
from adapter_store.registration.base_model import choose_base_model
from contract.words import MAX_LISTED
from servicekit.errors import InvalidArgument

LLAMA, QWEN = "meta-llama/Llama-3.1-8B", "qwen"
SERVED = {LLAMA: frozenset({LLAMA, "llama", "/srv/llama-8b"}), QWEN: frozenset({QWEN})}
TWO = KnownBaseModels(SERVED)
ONE = KnownBaseModels({QWEN: frozenset({QWEN})})
NONE = KnownBaseModels({})


@pytest.mark.parametrize(
    ("in_config", "base_model"),
    [
        (LLAMA, LLAMA),
        ("llama", LLAMA),
        ("Llama-3.1-8B", LLAMA),
        ("/mnt/models/Llama-3.1-8B", LLAMA),
        ("/mnt/models/Llama-3.1-8B/", LLAMA),
        ("C:\\models\\llama", LLAMA),
        ("file:///models/llama", LLAMA),
        ("/srv/llama-8b", LLAMA),
        ("/home/me/llama-8b", LLAMA),
        ("/root/.cache/huggingface/hub/models--meta-llama--Llama-3.1-8B/snapshots/0e9e3", LLAMA),
        ("Qwen/qwen", QWEN),
        ("./qwen", QWEN),
        ("./Qwen", QWEN),
        ("meta-llama/llama-3.1-8b", LLAMA),
        ("LLAMA", LLAMA),
        ("unsloth/Llama-3.1-8B", LLAMA),
        ("unsloth/Llama-3.1-8B-unsloth-bnb-4bit", LLAMA),
        ("/mnt/llama-AWQ", LLAMA),
        ("qwen-GPTQ-Int4", QWEN),
    ],
)
def test_base_model_with_a_server_under_a_matching_name(in_config, base_model):
    chosen = choose_base_model("", in_config, TWO)
    assert (chosen.name, chosen.source) == (base_model, BaseModelSource.SERVED)
    assert repr(in_config) in chosen.reason


@pytest.mark.parametrize("in_config", ["unsloth/Llama-3.2-8B-bnb-4bit", "out/base", "gpt2"])
@pytest.mark.parametrize("known", [TWO, ONE, NONE])
def test_model_that_no_server_has_is_recorded_as_named(in_config, known):
    chosen = choose_base_model("", in_config, known)
    assert (chosen.name, chosen.source) == (in_config, BaseModelSource.CONFIG)
    assert all(repr(base_model) in chosen.reason for base_model in known.served)
    assert ("--base-model NAME" in chosen.reason) is bool(known.served)


def test_the_whole_name_comes_before_its_last_part():
    names = ["org/llama", "Other/Llama", "other/llama", "llama"]
    known = KnownBaseModels({name: frozenset({name}) for name in names})
    for name in names:
        assert choose_base_model("", name, known).name == name
    assert choose_base_model("", "ORG/LLAMA", known).name == "org/llama"
    assert choose_base_model("", "third/Llama", known).name == "llama"


def test_base_models_with_a_server_come_before_those_whose_servers_are_gone():
    names = {name: frozenset({name}) for name in ("org/llama", "other/llama", QWEN)}
    known = KnownBaseModels(names, gone=frozenset({"org/llama", QWEN}))
    assert choose_base_model("", "/mnt/llama", known).name == "other/llama"
    assert choose_base_model("", QWEN, known).name == QWEN
    with pytest.raises(InvalidArgument, match="have left"):  # an outage is no choice
        choose_base_model("", "/mnt/x", known)
    with pytest.raises(InvalidArgument, match="'org/llama' \\(its servers have left\\), 'other/"):
        choose_base_model("", "/mnt/x", KnownBaseModels(names, gone=frozenset({"org/llama"})))
    all_gone = KnownBaseModels({QWEN: frozenset({QWEN})}, gone=frozenset({QWEN}))
    assert choose_base_model("", "", all_gone).name == QWEN


def test_config_that_names_another_model_than_the_chosen_one_is_told():
    for in_config, is_told in (
        ("/runs/x", True),
        ("gpt2", True),
        ("unsloth/llama-3.1-8b-bnb-4bit", False),
        ("/mnt/Llama-3.1-8B/", False),
        ("llama", False),
        ("", False),
        ("..", True),
    ):
        chosen = choose_base_model(LLAMA, in_config, TWO)
        assert ("make sure that it is the same model" in chosen.reason) is is_told, in_config
        assert (repr(in_config) in chosen.reason) is is_told
    assert "names '/mnt/x'" in choose_base_model("", "/mnt/x", ONE).reason
    assert "names '/mnt/x'" in choose_base_model("", "/mnt/x", TWO, QWEN).reason


def test_the_server_that_was_asked_comes_before_the_only_one():
    for known in (TWO, ONE, NONE):
        chosen = choose_base_model("", "/mnt/x", known, LLAMA)
        assert (chosen.name, chosen.source) == (LLAMA, BaseModelSource.DEFAULT)
    assert choose_base_model("", "/mnt/qwen", TWO, LLAMA).name == QWEN
    with pytest.raises(InvalidArgument, match="json has 'gpt2', and servers have registered"):
        choose_base_model("", "gpt2", TWO, LLAMA)


@pytest.mark.parametrize("in_config", ["", "/mnt/models/x", "..", "~", "/"])
def test_only_base_model_there_is(in_config):
    chosen = choose_base_model("", in_config, ONE)
    assert (chosen.name, chosen.source) == (QWEN, BaseModelSource.ONLY_SERVED)


@pytest.mark.parametrize("in_config", ["", "/mnt/models/x", LLAMA])
def test_what_the_caller_says_comes_first(in_config):
    known = KnownBaseModels(SERVED, QWEN, in_config)
    chosen = choose_base_model("org/said", in_config, known)
    assert (chosen.name, chosen.source) == ("org/said", BaseModelSource.CALLER)


@pytest.mark.parametrize(
    ("in_config", "before"),
    [
        ("", "anything"),
        ("/runs/2/llama", "/runs/1/llama"),
        (LLAMA, LLAMA),  # named wrongly, and by the same trainer again
        ("unsloth/x-bnb-4bit", "unsloth/x-bnb-4bit"),
    ],
)
def test_current_version_comes_second(in_config, before):
    chosen = choose_base_model("", in_config, KnownBaseModels(SERVED, "org/x", before))
    assert (chosen.name, chosen.source) == ("org/x", BaseModelSource.CURRENT_VERSION)


def test_config_that_names_another_model_than_before():
    known = KnownBaseModels(SERVED, QWEN, "Qwen/qwen")
    chosen = choose_base_model("", LLAMA, known)
    assert (chosen.name, chosen.source) == (LLAMA, BaseModelSource.SERVED)


def test_name_that_was_not_served_before_is_looked_for_again():
    known = KnownBaseModels(SERVED, "Qwen/qwen", "Qwen/qwen")
    assert choose_base_model("", "Qwen/qwen", known).name == QWEN
    known = KnownBaseModels(SERVED, "llama", "llama")
    assert choose_base_model("", "llama", known).source is BaseModelSource.CURRENT_VERSION


def test_refusal_lists_the_candidates_and_the_flag():
    with pytest.raises(InvalidArgument) as caught:
        choose_base_model("", "/mnt/models/x", TWO)
    assert caught.value.subject == "base_model"
    for text in ("--base-model NAME", "'/mnt/models/x'", repr(LLAMA), repr(QWEN)):
        assert text in caught.value.message
    with pytest.raises(InvalidArgument, match="has none, and no server has registered one"):
        choose_base_model("", "", NONE)


def test_refusal_of_several_that_match():
    names = [f"org{number}/llama" for number in range(MAX_LISTED + 2)]
    known = KnownBaseModels({name: frozenset({name}) for name in [*names, "org/other"]})
    with pytest.raises(InvalidArgument, match=r"may be 'org0/llama'.* and 2 others") as caught:
        choose_base_model("", "/mnt/llama", known)
    assert "org/other" not in caught.value.message
    # A name is no path: it is recorded, and served once it is clear by whom.
    chosen = choose_base_model("", "llama", known)
    assert chosen.source is BaseModelSource.CONFIG
    assert "of that name are 'org0/llama'" in chosen.reason
    assert "org/other" not in chosen.reason
