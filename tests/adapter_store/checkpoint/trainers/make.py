"""Makes the folders beside it, each by the trainer that names it: `python make.py NAME ...`.

Needs what the project does not: trl 1.16 with datasets, torchtune 0.6.1 with torchao 0.10,
mlx-lm 0.32 with mlx[cpu], and tinker-cookbook 0.6.1; install them into environments of their own
(PEFT refuses torchtune's torchao). `torchtune` comes first: the adapter that it exports is the one
that all the others save; `experts_tinker` is the one of those of a mixture of experts, and
tinker-cookbook writes `experts_apart` of it, as PEFT saves experts that are modules.

tinker and megatron cannot be installed here: their files are written to their published formats,
see TRAINERS in adapter_store/checkpoint/formats/readers.py.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

HERE = Path(__file__).resolve().parent
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
RANK, ALPHA, VOCAB = 2, 4, 64
PREFIX = "base_model.model."
SIZES = LlamaConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCAB,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=1,
)
EXPERTS, INNER = 4, 12
MIXTURE = Qwen3MoeConfig(
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=EXPERTS,
    num_experts_per_tok=2,
    moe_intermediate_size=INNER,
    decoder_sparse_step=1,
    intermediate_size=24,
    mlp_only_layers=[],
    vocab_size=VOCAB,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    norm_topk_prob=True,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=1,
)


def make_model(folder: Path, is_mixture: bool = False) -> None:
    """Writes the base model, with a tokenizer of letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(MIXTURE) if is_mixture else LlamaForCausalLM(SIZES)
    model.save_pretrained(folder)
    if is_mixture:  # by the names of Transformers 4, which MLX-LM reads
        config = json.loads((folder / "config.json").read_text())
        config |= {"num_experts": EXPERTS, "rope_theta": 10_000.0}
        (folder / "config.json").write_text(json.dumps(config))
    letters = ["<s>", "</s>", "<unk>", *map(chr, range(32, 32 + VOCAB - 3))]
    words = models.WordLevel({each: i for i, each in enumerate(letters)}, unk_token="<unk>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)


def make_torchtune(model: Path, out: Path) -> None:
    from torchtune import training
    from torchtune.models.llama3 import lora_llama3
    from torchtune.modules.peft import get_adapter_params
    from torchtune.training.checkpointing import FullModelHFCheckpointer

    lora = ["q_proj", "v_proj"]
    net = lora_llama3(
        lora_attn_modules=lora,
        vocab_size=VOCAB,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=16,
        max_seq_len=64,
        intermediate_dim=24,
        lora_rank=RANK,
        lora_alpha=ALPHA,
    )
    generator = torch.Generator().manual_seed(7)
    for name, parameter in sorted(net.named_parameters()):
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    with tempfile.TemporaryDirectory() as work:
        saver = FullModelHFCheckpointer(
            checkpoint_dir=str(model),
            checkpoint_files=["model.safetensors"],
            model_type="LLAMA3",
            output_dir=work,
            safe_serialization=True,
        )
        state = saver.load_checkpoint()
        state[training.ADAPTER_KEY] = get_adapter_params(net)
        # As recipes/lora_finetune_single_device.py has it.
        state[training.ADAPTER_CONFIG] = {
            "r": RANK,
            "lora_alpha": ALPHA,
            "target_modules": lora,
            "peft_type": "LORA",
        }
        saver.save_checkpoint(state, epoch=0, intermediate_checkpoint=False)
        shutil.copytree(Path(work) / "epoch_0", out)


def adapted(model: Path):
    """Returns the model with the adapter of all, as PEFT has it."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    base = LlamaForCausalLM.from_pretrained(model)
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    net = get_peft_model(base, config)
    set_peft_model_state_dict(net, load_file(HERE / "torchtune" / WEIGHTS))
    return net


def make_peft(model: Path, out: Path) -> None:
    adapted(model).save_pretrained(out)
    named(out)


def named(out: Path) -> None:
    """Gives the base model a hub's name, which was a path."""
    config = json.loads((out / CONFIG).read_text())
    (out / CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": "org/tiny"}))
    (out / "README.md").unlink()


def make_trl(model: Path, out: Path) -> None:
    """A checkpoint of a run of one step that changes nothing."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    with tempfile.TemporaryDirectory() as work, contextlib.chdir(work):
        arguments = SFTConfig(
            output_dir="run", max_steps=1, save_steps=1, learning_rate=0.0, report_to=[],
            per_device_train_batch_size=1, use_cpu=True, max_length=16, bf16=False,
            gradient_checkpointing=False,
        )  # fmt: skip
        trainer = SFTTrainer(
            adapted(model),
            arguments,
            train_dataset=Dataset.from_dict({"text": ["HELLO WORLD"]}),
            processing_class=PreTrainedTokenizerFast.from_pretrained(model),
        )
        trainer.train()
        shutil.copytree("run/checkpoint-1", out)
        named(out)


def make_mlx(model: Path, out: Path) -> None:
    """Trains one step at a rate of 0, resumed from the adapter."""
    tensors = {}
    for key, value in load_file(HERE / "torchtune" / WEIGHTS).items():
        name = key.removeprefix(PREFIX).removesuffix(".weight").replace("lora_A", "lora_a")
        tensors[name.replace("lora_B", "lora_b")] = value.T.contiguous()
    train_mlx(model, out, tensors, ["self_attn.q_proj", "self_attn.v_proj"], 2)


def train_mlx(
    model: Path, out: Path, tensors: dict[str, torch.Tensor], keys: list[str], num_layers: int
) -> None:
    work = model.parent.parent
    save_file(tensors, work / "start.safetensors")
    (work / "data").mkdir()
    for name in ("train", "valid"):
        (work / "data" / f"{name}.jsonl").write_text('{"text": "HELLO WORLD"}\n')
    settings = {"rank": RANK, "dropout": 0.0, "scale": ALPHA / RANK, "keys": keys}
    (work / "lora.yaml").write_text(json.dumps({"lora_parameters": settings}))
    options = {
        "--model": "org/tiny", "--data": "data", "--iters": 1, "--batch-size": 1,
        "-c": "lora.yaml", "--learning-rate": 0.0, "--num-layers": num_layers,
        "--resume-adapter-file": "start.safetensors", "--adapter-path": "adapters",
        "--save-every": 1, "--val-batches": 1,
    }  # fmt: skip
    words = [str(word) for option in options.items() for word in option]
    command = [sys.executable, "-m", "mlx_lm", "lora", "--train", *words]
    subprocess.run(command, check=True, cwd=work)
    shutil.copytree(work / "adapters", out)


def write(out: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> None:
    out.mkdir()
    save_file(tensors, out / WEIGHTS)
    (out / CONFIG).write_text(json.dumps(config, indent=2))


def make_tinker(model: Path, out: Path) -> None:
    """Like all of Tinker's, with the head, which it calls unembed_tokens."""
    generator = torch.Generator().manual_seed(8)
    tensors = load_file(HERE / "torchtune" / WEIGHTS)
    for side, shape in (("A", (RANK, 16)), ("B", (VOCAB, RANK))):
        key = f"{PREFIX}model.unembed_tokens.lora_{side}.weight"
        tensors[key] = torch.randn(shape, generator=generator) * 0.3
    write(out, tensors, TINKER)


TINKER = {
    "base_model_name_or_path": "org/tiny",
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": ALPHA,
    "target_modules": "all-linear",
    "use_rslora": False,
    "use_dora": False,
}


def make_experts_tinker(model: Path, out: Path) -> None:
    """Gate and up of an expert have one A, so that a parameter of both can be it, too."""
    generator = torch.Generator().manual_seed(9)
    tensors = {}
    sizes = {"w1": (16, INNER), "w2": (INNER, 16), "w3": (16, INNER)}
    for name, (size_in, size_out) in sizes.items():
        key = f"{PREFIX}model.layers.0.mlp.experts.{name}.lora_"
        a = torch.randn(EXPERTS, RANK, size_in, generator=generator) * 0.3
        b = torch.randn(EXPERTS, size_out, RANK, generator=generator) * 0.3
        shared = tensors.get(f"{key}A.weight".replace("w3", "w1"), a).clone()
        tensors |= {f"{key}A.weight": shared, f"{key}B.weight": b}
    write(out, tensors, TINKER)


def of_experts() -> dict[str, torch.Tensor]:
    """Returns A and B of the adapter by the names of Qwen3's projections and "A" or "B"."""
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    found = {}
    for key, value in load_file(HERE / "experts_tinker" / WEIGHTS).items():
        _, name, side = key.removesuffix(".weight").rsplit(".", 2)
        found[f"{names[name]}.{side[-1]}"] = value
    return found


def make_experts_apart(model: Path, out: Path) -> None:
    from tinker_cookbook.weights import build_lora_adapter

    adapter = str(HERE / "experts_tinker")
    build_lora_adapter(base_model=str(model), adapter_path=adapter, output_path=str(out))
    config = json.loads((out / CONFIG).read_text())
    (out / CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": "org/tiny"}))


def make_experts_mlx(model: Path, out: Path) -> None:
    module = "model.layers.0.mlp.switch_mlp"
    tensors = {
        f"{module}.{name.replace('.', '.lora_').lower()}": value
        for name, value in of_experts().items()
    }
    keys = [f"mlp.switch_mlp.{name}_proj" for name in ("gate", "up", "down")]
    train_mlx(model, out, tensors, keys, 1)


def make_experts_parameters(model: Path, out: Path) -> None:
    """Qwen3's in Transformers 5, where gate and up of all experts are one parameter."""
    from peft import LoraConfig, get_peft_model

    parts = of_experts()
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=[], target_parameters=names)
    net = get_peft_model(Qwen3MoeForCausalLM.from_pretrained(model), config)
    layer = net.get_submodule("base_model.model.model.layers.0.mlp.experts")
    while hasattr(layer, "parameter_name"):
        if layer.parameter_name == "down_proj":
            a, b = parts["down_proj.A"], parts["down_proj.B"]
        else:
            a = parts["gate_proj.A"]
            b = torch.cat([parts["gate_proj.B"], parts["up_proj.B"]], 1)
        layer.lora_A["default"].weight.data = a.flatten(0, 1)
        layer.lora_B["default"].weight.data = b.permute(1, 2, 0).flatten(1).contiguous()
        layer = layer.base_layer
    net.save_pretrained(out)
    named(out)


def make_megatron(model: Path, out: Path) -> None:
    config = {
        "peft_type": "LORA",
        "auto_mapping": None,
        "base_model_name_or_path": "org/tiny",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "r": RANK,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    write(out, load_file(HERE / "torchtune" / WEIGHTS), config)


MAKERS = {
    "torchtune": make_torchtune,
    "peft": make_peft,
    "trl": make_trl,
    "mlx": make_mlx,
    "tinker": make_tinker,
    "megatron": make_megatron,
    "experts_tinker": make_experts_tinker,
    "experts_apart": make_experts_apart,
    "experts_mlx": make_experts_mlx,
    "experts_parameters": make_experts_parameters,
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or MAKERS:
            model = Path(folder) / name / "org" / "tiny"
            make_model(model, name.startswith("experts"))
            shutil.rmtree(HERE / name, ignore_errors=True)
            MAKERS[name](model, HERE / name)


if __name__ == "__main__":
    main()
