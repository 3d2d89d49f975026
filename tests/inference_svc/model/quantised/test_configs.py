"""Configs of published checkpoints are read; keys that change the maths are refused by name."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from inference_svc.errors import UnsupportedModel
from inference_svc.model.quantised import Scheme, read_scheme
from inference_svc.model.quantised.names import MAX_PATTERN_CHARS, MAX_PATTERNS, ModuleNames
from kernels.quantised import Activations

LAYER = "model.layers.3"
Q, GATE = f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.gate"
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
BYTES = {"quant_method": "bitsandbytes", "load_in_8bit": True}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
MXFP4 = {"quant_method": "mxfp4"}


def compressed(weights: Any, form: str = "pack-quantized", **keys: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    group |= keys.pop("group", {})
    config = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    return {**config, "config_groups": {"group_0": group}, **keys}


def scheme(config: dict[str, Any], **keys: Any) -> Scheme:
    made = read_scheme({"quantization_config": config, "dtype": "bfloat16", **keys})
    assert made is not None
    return made


def form_of(made: Scheme, module: str = Q) -> str | None:
    matrix = made.matrix(module, 64, 256)
    return None if matrix is None else str(matrix.format)


@pytest.mark.parametrize(
    ("config", "name", "form"),
    [
        (compressed(INT4), "compressed-tensors, int4, groups of 32", "int4, groups of 32"),
        (GPTQ, "gptq, 4 bits, groups of 32", "int4, groups of 32"),
        ({**GPTQ, "desc_act": True}, "gptq, 4 bits, groups of 32, act-order", "None"),
        ({**GPTQ, "desc_act": True, "static_groups": True}, None, "int4, groups of 32"),
        ({**GPTQ, "bits": 8, "group_size": -1}, "gptq, 8 bits, per output", "int8, per output"),
        (AWQ, "awq, 4 bits, groups of 32", "uint4, groups of 32"),
        (NF4, "bitsandbytes, nf4", "nf4, groups of 64"),
        (BYTES, "bitsandbytes, int8", "int8, per output"),
        (BLOCKS, "fp8, blocks of 128 x 128", "fp8, groups of 128"),
        ({"quant_method": "fp8"}, "fp8, per tensor", "fp8, per output"),
        (FBGEMM, "fbgemm_fp8, per output", "fp8, per output"),
    ],
)
def test_each_method_has_a_name_and_a_format(
    config: dict[str, Any], name: str | None, form: str
) -> None:
    made = scheme(config)
    assert name in (None, made.name)
    assert form_of(made) == form
    assert form_of(made, "lm_head") is None
    again = pickle.loads(pickle.dumps(made))
    assert (again.name, form_of(again)) == (made.name, form)


def test_plain_configs_have_no_scheme() -> None:
    assert read_scheme({"text_config": {"hidden_size": 64}}) is None
    assert read_scheme({"quantization_config": None, "compression_config": {}}) is None


def test_a_config_may_lie_elsewhere() -> None:
    for config in (
        {"compression_config": compressed(INT4)},
        {"text_config": {"quantization_config": compressed(INT4)}},
        {"quantization_config": {"quantization_config": compressed(INT4), "sparsity_config": {}}},
        {"quantization_config": GPTQ, "text_config": {"quantization_config": GPTQ}},
    ):
        made = read_scheme(config)
        assert made is not None
        assert form_of(made) == "int4, groups of 32"
    with pytest.raises(UnsupportedModel, match=r"text_config\.quantization_config differs"):
        scheme(GPTQ, text_config={"quantization_config": AWQ})


def test_only_stacked_experts_are_mxfp4() -> None:
    made = scheme({**MXFP4, "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]})
    experts = f"{LAYER}.mlp.experts.gate_up_proj"
    matrix = made.matrix(experts, 64, 256, 3)
    assert matrix is not None
    assert str(matrix.format) == "fp4, groups of 32"
    assert matrix.tensors["_blocks"].shape == (3, 64, 8, 16)
    assert form_of(made) is None
    plain = scheme({**MXFP4, "modules_to_not_convert": [experts]})
    assert plain.matrix(experts, 64, 256, 3) is None


@pytest.mark.parametrize("config", [compressed(INT4), GPTQ, AWQ, NF4, BLOCKS, FBGEMM])
def test_only_mxfp4_has_experts_in_one_tensor(config: dict[str, Any]) -> None:
    assert scheme(config).matrix(f"{LAYER}.mlp.experts.gate_up_proj", 64, 256, 3) is None


INPUTS = {"group": {"input_activations": TOKEN}}


def test_int8_inputs_are_rounded_and_fp8_ones_are_not() -> None:
    matrix = scheme(compressed(INT8, "int-quantized", **INPUTS)).matrix(Q, 64, 256)
    assert matrix is not None
    assert matrix.format is not None
    assert matrix.format.activations is Activations.INT8
    for args in ({**TOKEN, "type": "float"}, {**FP8, "strategy": "tensor", "dynamic": False}):
        config = compressed(FP8, "float-quantized", group={"input_activations": args})
        matrix = scheme(config).matrix(Q, 64, 256)
        assert matrix is not None
        assert matrix.format is not None
        assert matrix.format.activations is Activations.EXACT


def test_several_groups_lead_to_a_format_each() -> None:
    groups = {
        "a": {"targets": ["Linear"], "weights": INT4},
        "b": {"targets": ["re:.*down_proj$"], "weights": {**INT4, "group_size": 128}},
        "c": {"targets": [Q], "weights": FP8, "format": "float-quantized"},
        "d": {"targets": ["re:.*q_proj"], "weights": INT8, "format": "int-quantized"},
    }
    for each in ("a", "b"):
        groups[each]["format"] = "pack-quantized"
    made = scheme({**compressed(INT4, "mixed-precision"), "config_groups": groups})
    assert form_of(made) == "fp8, per output"
    assert form_of(made, Q.replace("3", "4")) == "int8, per output"
    assert form_of(made, f"{LAYER}.mlp.down_proj") == "int4, groups of 128"
    assert form_of(made, f"{LAYER}.mlp.up_proj") == "int4, groups of 32"
    assert made.name.startswith(
        "compressed-tensors, int4, groups of 32 and int4, groups of 128 and"
    )


@pytest.mark.parametrize(
    ("ignored", "module", "is_plain"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "language_model.lm_head", True),
        (GATE, GATE, True),
        (GATE, f"{GATE}_proj", False),
        ("model.language_model.layers.3.mlp.gate", "language_model.model.layers.3.mlp.gate", True),
        ("re:.*mlp.gate$", GATE, True),
        ("re:.*mlp.gate$", f"{GATE}_proj", False),
        ("re:mlp", GATE, False),
        (r"re:^(?!.*q_proj).*layers\.\d+\..*", GATE, True),
        (r"re:^(?!.*q_proj).*layers\.\d+\..*", Q, False),
    ],
)
def test_compressed_tensors_ignores_paths_and_patterns(
    ignored: str, module: str, is_plain: bool
) -> None:
    made = scheme(compressed(INT4, ignore=[ignored]))
    assert (form_of(made, module) is None) == is_plain


@pytest.mark.parametrize(
    ("kept", "module", "is_plain"),
    [
        (GATE, GATE, True),
        (LAYER, Q, True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("mlp.gate", GATE, True),
        ("mlp.gate", f"{GATE}_proj", False),
        ("self_attn", Q, True),
        ("model.layers.*.self_attn", Q, True),
        ("model.layers.*.mlp.gate", f"{GATE}_proj", False),
        ("a|model.layers.3", Q, True),
    ],
)
@pytest.mark.parametrize(
    ("config", "key"),
    [
        (NF4, "llm_int8_skip_modules"),
        (AWQ, "modules_to_not_convert"),
        (BLOCKS, "modules_to_not_convert"),
        (BLOCKS, "ignored_layers"),
        (FBGEMM, "modules_to_not_convert"),
    ],
    ids=str,
)
def test_lists_of_transformers_mean_parts_of_paths(
    config: dict[str, Any], key: str, kept: str, module: str, is_plain: bool
) -> None:
    assert (form_of(scheme({**config, key: [kept]}), module) is None) == is_plain


def test_gptq_quantises_layers_and_the_head_if_it_says_so() -> None:
    assert form_of(scheme({**GPTQ, "lm_head": True}), "lm_head") == "int4, groups of 32"
    made = scheme({**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up"]]})
    assert form_of(made) == "int4, groups of 32"
    assert form_of(made, f"{LAYER}.self_attn.k_proj") is None
    made = scheme({**GPTQ, "dynamic": {r"-:.*\.q_proj": {}}})
    assert form_of(made) is None
    assert form_of(made, f"{LAYER}.mlp.up_proj") == "int4, groups of 32"


def refused(base: dict[str, Any], *, match: str, **keys: Any) -> Any:
    return pytest.param({**base, **keys}, match, id=f"{base['quant_method']} {match}")


def changed(weights: dict[str, Any], match: str, form: str = "pack-quantized", **keys: Any) -> Any:
    config = compressed({**weights, **keys}, form)
    return pytest.param(config, rf"group_0\.weights\.{match}", id=f"{form} {match}")


def inputs(
    match: str, weights: dict[str, Any] = INT8, form: str = "int-quantized", **keys: Any
) -> Any:
    config = compressed(weights, form, group={"input_activations": {**TOKEN, **keys}})
    return pytest.param(config, rf"input_activations\.{match}", id=f"inputs {form} {match}")


@pytest.mark.parametrize(
    ("config", "match"),
    [
        refused({"quant_method": "aqlm"}, match="quant_method = 'aqlm': supported are awq"),
        refused({"quant_method": ["awq"]}, match=r"quant_method = \['awq'\]"),
        refused({"quant_method": None}, match="quant_method = None", bits=4),
        refused(compressed(INT4), match="kv_cache_scheme = ", kv_cache_scheme=FP8),
        refused(compressed(INT4), match="sparsity_config.format", sparsity_config={"format": "24"}),
        refused(
            compressed(INT4),
            match=r"transform_config\.config_groups",
            transform_config={"config_groups": {"u": {"type": "hadamard"}}},
        ),
        refused(compressed(INT4), match="format = 'marlin-24'", format="marlin-24"),
        refused(compressed(INT4), match="format = 'dense'", format="dense"),
        refused(compressed(INT4), match="rotation = 'x': not known", rotation="x"),
        refused(compressed(INT4), match="config_groups = {}", config_groups={}),
        refused(compressed(INT4), match="config_groups.a = ", config_groups={"a": ["Linear"]}),
        refused(compressed(INT4), match="config_groups.a = None", config_groups={"a": None}),
        refused(compressed(INT4), match=r"groups\.'\\ud800' = 1", config_groups={"\ud800": 1}),
        refused(
            compressed(INT4), match=r"config_groups\.'a{76}\.\.\. =", config_groups={"a" * 99: 1}
        ),
        refused(compressed(INT4), match="ignore = 'lm_head': must be a list", ignore="lm_head"),
        refused(compressed(INT4), match="ignore: .* is no pattern", ignore=["re:("]),
        refused(compressed(INT4, group={"targets": ["LlamaAttention"]}), match="targets = "),
        refused(compressed(INT4, group={"output_activations": FP8}), match="output_activations"),
        refused(compressed(None), match="group_0.weights = None"),
        changed(INT4, "num_bits = 3", num_bits=3),
        changed(INT4, "num_bits = True", num_bits=True),
        changed(INT4, "type = 'float'", type="float"),
        changed(INT4, "strategy = 'block'", strategy="block", group_size=None),
        changed(INT4, "group_size = None", group_size=None),
        changed(INT4, "group_size = 33", group_size=33),
        changed(INT4, "group_size = 32: strategy", strategy="channel"),
        changed(INT4, "dynamic = True", dynamic=True),
        changed(INT4, "actorder = 'other'", actorder="other"),
        changed(INT4, "symmetric = 'yes'", symmetric="yes"),
        changed(INT4, "zeta = 1: not known", zeta=1),
        changed(INT8, "actorder = 'group'", "int-quantized", actorder="group"),
        changed(INT8, "num_bits = 4", "int-quantized", num_bits=4),
        changed(FP8, "symmetric = False", "float-quantized", symmetric=False),
        changed(FP8, "strategy = 'group'", "float-quantized", strategy="group", group_size=32),
        changed(FP8, "block_structure = ", "naive-quantized", strategy="block"),
        inputs("dynamic = False", dynamic=False),
        inputs("strategy = 'tensor'", strategy="tensor"),
        inputs("symmetric = False", symmetric=False),
        inputs("num_bits = 4", num_bits=4),
        inputs("type = 'int'", INT4, "pack-quantized"),
        inputs("type = 'int'", {**INT8, "symmetric": False}),
        inputs("type = 'int'", FP8, "float-quantized"),
        refused(GPTQ, match="bits = 3", bits=3),
        refused(GPTQ, match="checkpoint_format = 'marlin'", checkpoint_format="marlin"),
        refused(GPTQ, match="is_marlin_format = True", is_marlin_format=True),
        refused(GPTQ, match="dynamic = ", dynamic={"+:.*down.*": {"bits": 8}}),
        refused(GPTQ, match="group_size = 0", group_size=0),
        refused(GPTQ, match="desc_act = 'no'", desc_act="no"),
        refused(GPTQ, match="pack_dtype = 'int16'", pack_dtype="int16"),
        refused(GPTQ, match="modules_in_block_to_quantize", modules_in_block_to_quantize="q_proj"),
        refused(AWQ, match="version = 'gemv'", version="gemv"),
        refused(AWQ, match="zero_point = False", zero_point=False),
        refused(AWQ, match="bits = 8", bits=8),
        refused(NF4, match="bnb_4bit_quant_type = 'fp4'", bnb_4bit_quant_type="fp4"),
        refused(NF4, match="bnb_4bit_quant_type = None", bnb_4bit_quant_type=None),
        refused(NF4, match="load_in_4bit = True: either", load_in_8bit=True),
        refused(NF4, match="bnb_4bit_quant_storage = 'int16'", bnb_4bit_quant_storage="int16"),
        refused(BYTES, match="llm_int8_has_fp16_weight = True", llm_int8_has_fp16_weight=True),
        refused(BLOCKS, match="weight_block_size = 128", weight_block_size=128),
        refused(BLOCKS, match="fmt = 'e5m2'", fmt="e5m2"),
        refused(BLOCKS, match="expert_dtype = 'fp4'", expert_dtype="fp4"),
        refused(BLOCKS, match="modules_to_convert = ", modules_to_convert=["embed"]),
        refused(MXFP4, match="block = 16: not known", block=16),
    ],
)
def test_keys_that_change_the_maths_are_refused(config: dict[str, Any], match: str) -> None:
    with pytest.raises(UnsupportedModel, match=match) as caught:
        scheme(config)
    assert "docs/models.md" in str(caught.value)
    str(caught.value).encode()


@pytest.mark.parametrize(
    ("config", "shape", "match"),
    [
        (compressed(INT4), (64, 40), "40 inputs are no multiple of group_size = 32"),
        (GPTQ, (64, 36), "36 inputs are no multiple of 8"),
        (AWQ, (60, 64), "60 outputs"),
        (AWQ, (64, 40), "40 inputs"),
        ({**NF4, "bnb_4bit_quant_storage": "float32"}, (1, 66), "33 bytes"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    config: dict[str, Any], shape: tuple[int, int], match: str
) -> None:
    with pytest.raises(UnsupportedModel, match=match):
        scheme(config).matrix(Q, *shape)


def test_stacked_experts_of_mxfp4_have_whole_blocks() -> None:
    with pytest.raises(UnsupportedModel, match="40 inputs are no multiple of 32"):
        scheme(MXFP4).matrix(f"{LAYER}.mlp.experts.down_proj", 64, 40, 2)


@pytest.mark.parametrize(
    "pattern",
    ["(a+", "é", "[[a]]", "(?R)", r"\p{L}", "a{1000}", "a{2}{2}{2}", "(?e)a{e<3}", "[a&&b]"],
)
def test_patterns_with_other_syntax_are_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.json\.ignore: .*pattern"):
        ModuleNames("config.json.ignore", (), [pattern], are_parts=False)


def test_patterns_are_bounded() -> None:
    with pytest.raises(UnsupportedModel, match="too large"):
        ModuleNames("ignore", (), ["a" * (MAX_PATTERN_CHARS + 1)], are_parts=False)
    with pytest.raises(UnsupportedModel, match=f"more than {MAX_PATTERNS} patterns"):
        ModuleNames("ignore", (), map(str, range(MAX_PATTERNS + 1)), are_parts=False)
    slow = ModuleNames("ignore", (), ["(a|aa)+b"], are_parts=False, budget_s=0.05)
    with pytest.raises(UnsupportedModel, match="takes too long"):
        [f"{'a' * count}!" in slow for count in range(20, 500)]
