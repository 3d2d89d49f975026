"""The config's verdicts and matching, held against PEFT itself."""

import dataclasses
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from adapter_store.checkpoint.peft.config import AdapterConfig, parse_config
from adapter_store.checkpoint.peft.fields import HONOURED, NO_EFFECT, REFUSED, SUBCONFIGS
from adapter_store.checkpoint.reading.files import CheckpointLimits
from adapter_store.errors import InvalidAdapter
from contract.base_model_names import names_local_path

LIMITS = CheckpointLimits(max_match_seconds=0.5)
MODULES = [
    f"{root}layers.{layer}.{part}"
    for root in ("model.", "model.decoder.", "")
    for layer in (0, 1, 2, 11)
    for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.experts.1.up_proj")
] + ["model.embed_tokens", "lm_head", "q_proj", "model.norm"]


def parse(**fields: Any) -> AdapterConfig:
    return parse_config({"peft_type": "LORA", "target_modules": ["q_proj"], **fields}, LIMITS)


def refusal(**fields: Any) -> InvalidAdapter:
    with pytest.raises(InvalidAdapter) as error:
        parse(**fields)
    return error.value


def test_every_field_of_peft_has_one_verdict():
    fields = [field.name for field in dataclasses.fields(LoraConfig)]
    verdicts = [*HONOURED, *NO_EFFECT, *REFUSED]
    assert sorted(verdicts) == sorted(fields)


def test_a_config_as_peft_saves_it_is_accepted():
    saved = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", lora_dropout=0.1)
    saved.base_model_name_or_path = "org/tiny"
    fields = {**saved.to_dict(), "target_modules": ["q_proj"], "peft_type": "LORA"}
    config = parse_config(fields, LIMITS)
    assert (config.base_model, config.rank, config.alpha) == ("org/tiny", 8, 8.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("layer_replication", [[0, 4], [2, 5]]),
        ("megatron_config", {"x": 1}),
        ("velora_config", {"num_groups": 8}),
        ("monteclora_config", {"num_samples": 2}),
        ("arrow_config", {"top_k": 3}),
        ("kasa_config", {"beta": 0.1}),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "something_new"),
        ("init_lora_weights", ["pissa"]),
        ("peft_type", "ADALORA"),
        ("peft_type", None),
    ],
)
def test_what_changes_the_maths_is_refused_by_name_and_value(key, value):
    error = refusal(**{key: value})
    assert (error.subject, error.reason) == (key, "CONFIG_UNSUPPORTED")
    assert key in error.message
    assert repr(value) in error.message


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_a_refusal_tells_why_and_what_to_do_instead(key):
    error = refusal(**{key: {"some": "value"}})
    assert f"{REFUSED[key].why}; {REFUSED[key].instead}" in error.message


@pytest.mark.parametrize(
    ("init", "instead"),
    [
        ("pissa", "`loadout convert IN OUT`"),
        ("OLoRA", "`loadout convert IN OUT`"),
        ("loftq", "`loadout convert IN OUT`"),
        ("something_new", "path_initial_model_for_weight_conversion"),
    ],
)
def test_a_refused_init_tells_what_to_do_instead(init, instead):
    assert instead in refusal(init_lora_weights=init).message


@pytest.mark.parametrize("key", sorted(REFUSED))
@pytest.mark.parametrize("value", [None, False, "", []])
def test_what_is_off_is_accepted(key, value):
    parse(**{key: value})


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_an_empty_object_is_on_where_it_is_for_peft(key):
    is_on = bool(getattr(LoraConfig(task_type="CAUSAL_LM", **{key: {}}), key))
    assert is_on == (key in SUBCONFIGS)
    if is_on:
        assert refusal(**{key: {}}).subject == key
    else:
        parse(**{key: {}})


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_inits_that_leave_the_base_alone_are_accepted(init):
    parse(init_lora_weights=init)


def test_unknown_key_is_refused_unless_it_is_off():
    error = refusal(use_new_thing=3)
    assert (error.subject, error.reason) == ("use_new_thing", "CONFIG_UNKNOWN")
    assert "the store's operator to allow it with --allow-config-keys" in error.message
    parse(use_new_thing=None, other_thing=False, third={}, fourth=[], fifth="")


def test_unknown_keys_may_pass_where_they_are_allowed():
    allowed = frozenset({"note", "other", "use_qalora", "off"})
    fields = {"peft_type": "LORA", "target_modules": ["q_proj"], "note": 3, "other": "x"}
    limits = dataclasses.replace(LIMITS, allowed_config_keys=allowed)
    assert parse_config({**fields, "off": None}, limits).ignored_keys == ("note", "other")
    for key in ("use_qalora", "use_new_thing"):  # the one is known
        with pytest.raises(InvalidAdapter, match=key):
            parse_config({**fields, key: True}, limits)
    everything = dataclasses.replace(LIMITS, allowed_config_keys=None)
    assert parse_config({**fields, "use_new_thing": True}, everything).ignored_keys == (
        *("note", "other", "use_new_thing"),
    )
    with pytest.raises(InvalidAdapter, match="use_qalora"):
        parse_config({**fields, "use_qalora": True}, everything)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("r", 0),
        ("r", -1),
        ("r", 8.0),
        ("r", "8"),
        ("r", True),
        ("lora_alpha", "16"),
        ("lora_alpha", float("inf")),
        ("lora_alpha", 10**400),
        ("lora_alpha", None),
        ("use_rslora", "yes"),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"q_proj": 0}),
        ("alpha_pattern", {"q_proj": None}),
        ("target_modules", None),
        ("target_modules", []),
        ("target_modules", ""),
        ("target_modules", [1]),
        ("exclude_modules", {"a": 1}),
        ("layers_to_transform", "all"),
        ("layers_to_transform", [True]),
        ("layers_pattern", ["layers"]),
        ("base_model_name_or_path", 7),
        ("base_model_name_or_path", "a\nb"),
        ("fan_in_fan_out", "yes"),
    ],
)
def test_unusable_value_is_refused_by_name(key, value):
    error = refusal(**{key: value})
    assert (error.subject, error.reason) == (key, "CONFIG_INVALID")


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ".*q_proj", "layers_to_transform": [0]},
        {"target_modules": ".*q_proj", "layers_pattern": ["h"]},
        {"target_modules": ["q_proj"], "layers_pattern": ["h"]},
    ],
)
def test_layer_fields_that_peft_refuses_are_refused(fields):
    with pytest.raises(ValueError, match="layers_"):
        LoraConfig(**fields)
    assert refusal(**fields).subject.startswith("layers_")


@pytest.mark.parametrize(
    ("base_model", "is_path"),
    [
        ("meta-llama/Llama-3.1-8B", False),
        ("gpt2", False),
        ("org/name.with.dots-1", False),
        ("/mnt/models/llama", True),
        ("./llama", True),
        ("../llama", True),
        ("~/llama", True),
        ("outputs/run-3/llama", True),
        ("C:\\models\\llama", True),
        ("D:/models/llama", True),
        ("models\\llama", True),
        ("file:///models/llama", True),
        (".", True),
    ],
)
def test_local_path_is_no_model_name(base_model, is_path):
    assert parse(base_model_name_or_path=base_model).base_model == base_model
    assert names_local_path(base_model) == is_path


def test_rank_over_the_limit():
    assert refusal(r=4097).reason == "RANK_TOO_LARGE"
    assert refusal(rank_pattern={"q_proj": 4097}).subject == "rank_pattern"


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["q_proj", "lm_head", "embed_tokens", "absent"]},
        {"target_modules": ["layers.1.self_attn.q_proj", "up_proj"]},
        {"target_modules": r".*\.(q|k)_proj"},
        {"target_modules": r"(?i)model\.LAYERS\.[01]\..*"},
        {"target_modules": "q_proj"},
        {"target_modules": "q_proj|lm_head"},
        {"target_modules": ["up_proj"], "exclude_modules": ["experts.1.up_proj"]},
        {"target_modules": ["q_proj", "k_proj"], "exclude_modules": r".*layers\.1\..*"},
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1, 11]},
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1},
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": []},
        {"target_modules": ["model.layers.2.self_attn.q_proj"], "layers_to_transform": [0]},
        {
            "target_modules": ["q_proj", "up_proj"],
            "layers_to_transform": [1],
            "layers_pattern": "layers",
        },
        {
            "target_modules": ["q_proj", "up_proj"],
            "layers_to_transform": [1],
            "layers_pattern": ["experts", "h", r"decoder\.layers"],
        },
    ],
)
def test_modules_are_those_that_peft_adapts(fields):
    theirs = LoraConfig(**fields)
    ours = parse(**fields)
    chosen = [name for name in MODULES if ours.selects(name, is_embedding=False)]
    assert chosen == [name for name in MODULES if check_target_module_exists(theirs, name)]
    assert chosen


def test_all_linear_leaves_out_embedding_and_head():
    config = parse(target_modules="all-linear")
    assert config.selects("model.layers.0.mlp.up_proj", is_embedding=False)
    assert not config.selects("lm_head", is_embedding=False)
    assert not config.selects("model.embed_tokens", is_embedding=True)


PATTERNS = [
    {"q_proj": 16},
    {"^model.layers.0.self_attn.q_proj": 2, "q_proj": 3, "up_proj": 5},
    {r"layers\.\d\d\..*": 7, "k_proj": 9},
    {"model.layers.1.mlp.up_proj": 4, r".*\.up_proj": 6},
    {"q_proj|k_proj": 11},
    {"self_attn.?._proj": 12, "": 13},
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern_keys_match_as_in_peft(pattern):
    ours = parse(r=1, lora_alpha=2, rank_pattern=pattern, alpha_pattern=pattern)
    for name in MODULES:
        expected = pattern.get(get_pattern_key(pattern.keys(), name))
        assert ours.settings_for(name).rank == (expected or 1)
        assert ours.settings_for(name).alpha == (expected or 2)


@given(
    st.lists(
        st.text("layers.01qk_proj|()*+?[]^$\\d", max_size=12), min_size=1, max_size=3, unique=True
    )
)
def test_any_pattern_matches_as_in_peft_or_is_refused(sources):
    pattern = {source: index + 2 for index, source in enumerate(sources)}
    try:
        ours = parse(r=1, rank_pattern=pattern)
    except InvalidAdapter:
        return
    for name in MODULES[:6]:
        assert ours.settings_for(name).rank == pattern.get(get_pattern_key(pattern.keys(), name), 1)


def test_scale_is_that_of_lora_and_of_rslora():
    assert parse(r=4, lora_alpha=6).settings_for("x").scale == 1.5
    assert parse(r=4, lora_alpha=6, use_rslora=True).settings_for("x").scale == 3.0


@pytest.mark.parametrize("source", [r"(.*a){12}", r"(a|aa)+$"])
def test_catastrophic_pattern_is_stopped(source):
    config = parse(target_modules=source)
    start_s = time.perf_counter()
    with pytest.raises(InvalidAdapter) as error:
        [config.selects("a" * n + "!", is_embedding=False) for n in range(20, 500)]
    assert error.value.reason == "PATTERN_TOO_SLOW"
    assert error.value.subject == "target_modules"
    assert time.perf_counter() - start_s < 10


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("(", "PATTERN_INVALID"),
        ("(" * 4000, "PATTERN_INVALID"),
        ("(?i)" + "[\u0000-\uffff]" * 900, "PATTERN_INVALID"),
        (r"(?i)[\u0000-\uffff]", "PATTERN_INVALID"),
        ("[[:alpha:]]", "PATTERN_INVALID"),
        ("(?:ab){e<=1}", "PATTERN_INVALID"),
        ("(?R)", "PATTERN_INVALID"),
        ("[a--b]", "PATTERN_INVALID"),
        ("[0||", "PATTERN_INVALID"),
        ("a{9999999999999}", "PATTERN_INVALID"),
        ("a{" + "9" * 5000 + "}", "PATTERN_INVALID"),
        ("a" * 8193, "PATTERN_TOO_LARGE"),
        ("a{999999}", "PATTERN_TOO_LARGE"),
        ("(?:(?:(?:a{99}){99}){99}){99}", "PATTERN_TOO_LARGE"),
    ],
)
def test_pattern_out_of_bounds_is_refused(source, reason):
    error = refusal(alpha_pattern={source: 3})
    assert (error.subject, error.reason) == ("alpha_pattern", reason)


def test_a_layers_pattern_that_reads_no_layer_is_refused():
    """PEFT ends with a TypeError on it."""
    fields = {"layers_to_transform": [0], "layers_pattern": "model|layers"}
    with pytest.raises(InvalidAdapter) as error:
        parse(**fields).selects("model.layers.0.q_proj", is_embedding=False)
    assert (error.value.subject, error.value.reason) == ("layers_pattern", "PATTERN_INVALID")


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_many_patterns_share_the_seconds(key):
    """Plain or not, quick or not: what counts is their sum, compiling them included."""
    limits = CheckpointLimits(max_match_seconds=0.02)
    for sources in ([f"a{i}" for i in range(20_000)], [f"a+{i}" for i in range(2000)]):
        fields = {"peft_type": "LORA", "target_modules": ["x"], key: dict.fromkeys(sources, 2)}
        with pytest.raises(InvalidAdapter) as error:
            parse_config(fields, limits)
        assert (error.value.subject, error.value.reason) == (key, "PATTERN_TOO_SLOW")


@pytest.mark.parametrize("source", ["plain", "(a|aa)+b"])
def test_quick_matches_use_up_the_seconds_too(source):
    fields = {"peft_type": "LORA", "target_modules": ["q_proj"], "rank_pattern": {source: 2}}
    config = parse_config(fields, CheckpointLimits(max_match_seconds=0.05))
    with pytest.raises(InvalidAdapter) as error:
        all(config.settings_for("a" * 14) for _ in range(10_000_000))
    assert (error.value.subject, error.value.reason) == ("rank_pattern", "PATTERN_TOO_SLOW")


def test_long_lists_of_modules_cost_nothing_per_module():
    listed = [f"m{i}" for i in range(100_000)]
    config = parse(target_modules=[*listed, "q_proj"], exclude_modules=listed)
    start_s = time.thread_time()
    assert all(config.selects(f"layers.{i}.q_proj", is_embedding=False) for i in range(5000))
    assert time.thread_time() - start_s < 5
