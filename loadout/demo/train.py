"""Train the demo's model and adapters from nothing: `python -m loadout.demo.train [--out DIR]`.

The base learns to copy a word; every adapter is then trained on the saved base. The files are in
ordinary Hugging Face and PEFT format. The run ends by measuring the saved files on held-out words,
and fails if a job is below its bar.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from loadout.demo import jobs
from loadout.demo.jobs import AdapterSpec, Job

ASSETS = Path(__file__).parent / "assets"
SEED = 7

SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
PAD, BOS, EOS, UNK = SPECIAL_TOKENS
CHAT_TEMPLATE = (
    "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ bos_token }}{{ asked[-1]['content'] }}" + jobs.SEPARATOR
)
STORED_DTYPE = torch.bfloat16

BATCH_SIZE = {"base": 128, "adapter": 64}
POOLED_BATCHES = 8
STEPS = {
    "base": 1100,
    "upper": 700,
    "double-letters": 700,
    "pig-latin": 600,
    "no-vowels": 700,
    "rot13": 600,
    "next": 700,
    "reverse": 700,
    "sort": 900,
}
PEAK_LEARNING_RATE = {"base": 3e-3, "adapter": 4e-3}
WARMUP_SHARE = 0.06  # of all steps; then half a cosine down to nothing
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.01
MAX_GRAD_NORM = 1.0
IGNORED_LABEL = -100  # the label that cross_entropy leaves out

EVALUATED_WORDS = 500
EVALUATION_SEED = 0
MIN_EXACT = {"base": 0.99, "adapter": 0.97}
MAX_ANSWER_TOKENS = jobs.MAX_ANSWER_LETTERS + 1  # with the end-of-sequence token


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that any text goes in and comes out unchanged; encoding adds BOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocab[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=SHAPE["max_position_embeddings"],
        chat_template=CHAT_TEMPLATE,
    )


def build_base(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained base, in fp32."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **SHAPE,
    )
    return LlamaForCausalLM(config)


def kind(job: Job) -> str:
    """The key of the constants above."""
    return "base" if job.adapter is None else "adapter"


def encode(tokenizer: PreTrainedTokenizerFast, job: Job, words: list[str]) -> tuple[Tensor, Tensor]:
    """Token ids and labels, both [words, longest]; only the answer and its end are labelled."""
    ids, labels = [], []
    for word in words:
        prompt = tokenizer.encode(jobs.prompt(word))
        answer = tokenizer.encode(jobs.expected(job, word), add_special_tokens=False)
        answer.append(tokenizer.eos_token_id)
        ids.append(torch.tensor(prompt + answer))
        labels.append(torch.tensor([IGNORED_LABEL] * len(prompt) + answer))
    pad = nn.utils.rnn.pad_sequence
    return (
        pad(ids, batch_first=True, padding_value=tokenizer.pad_token_id),
        pad(labels, batch_first=True, padding_value=IGNORED_LABEL),
    )


def batches(tokenizer: PreTrainedTokenizerFast, job: Job) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches for `encode`, each of words of like length so that little is padding."""
    words, size = jobs.training_words(job, SEED), BATCH_SIZE[kind(job)]
    rng = random.Random(SEED)
    while True:
        pool = sorted(islice(words, size * POOLED_BATCHES), key=len)
        starts = list(range(0, len(pool), size))
        rng.shuffle(starts)
        for start in starts:
            yield encode(tokenizer, job, pool[start : start + size])


def fit(model: nn.Module, tokenizer: PreTrainedTokenizerFast, job: Job, progress: Progress) -> None:
    """Train the weights of `model` that require gradients, in place."""
    steps, peak = STEPS[job.name], PEAK_LEARNING_RATE[kind(job)]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=peak, betas=BETAS, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, peak, total_steps=steps, pct_start=WARMUP_SHARE, cycle_momentum=False
    )
    task = progress.add_task(job.title, total=steps, loss=math.nan)
    model.train()
    for ids, labels in islice(batches(tokenizer, job), steps):
        # Padding is on the right here, so causal attention alone keeps it out of labelled tokens.
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(weights, MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.update(task, advance=1, loss=loss.item())


def lora_config(spec: AdapterSpec) -> LoraConfig:
    """`spec` as PEFT writes it into adapter_config.json."""
    return LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        target_modules=list(spec.target_modules),
        use_rslora=spec.use_rslora,
        rank_pattern=dict(spec.rank_pattern),
        alpha_pattern=dict(spec.alpha_pattern),
        layers_to_transform=spec.layers_to_transform and list(spec.layers_to_transform),
        task_type="CAUSAL_LM",
    )


def train_base(out: Path, progress: Progress) -> PreTrainedTokenizerFast:
    """Train the base and save it with its tokenizer."""
    torch.manual_seed(SEED)
    tokenizer = build_tokenizer()
    model = build_base(tokenizer)
    fit(model, tokenizer, jobs.BASE, progress)
    model.to(STORED_DTYPE).save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    return tokenizer


def train_adapter(
    out: Path, tokenizer: PreTrainedTokenizerFast, job: Job, progress: Progress
) -> None:
    """Train one adapter on the saved base and save it as PEFT does."""
    assert job.adapter is not None
    directory = out / "adapters" / job.name
    torch.manual_seed(SEED)
    config = lora_config(job.adapter)
    base = LlamaForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    model = get_peft_model(base, config)
    fit(model, tokenizer, job, progress)
    # Not model.save_pretrained: it adds a model card and looks for the base's config on the hub.
    weights = get_peft_model_state_dict(model, save_embedding_layers=False)
    stored = {name: weight.to(STORED_DTYPE).contiguous() for name, weight in weights.items()}
    config.inference_mode = True
    config.base_model_name_or_path = jobs.BASE_MODEL  # PEFT put our local path here
    config.target_modules = list(job.adapter.target_modules)  # and a set, whose order varies
    config.save_pretrained(directory)
    save_file(stored, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def load_all(out: Path, dtype: torch.dtype) -> PeftModel:
    """The saved base with every saved adapter, named as its job."""
    base = LlamaForCausalLM.from_pretrained(out / "model", dtype=dtype)
    first, *others = (job.name for job in jobs.ADAPTER_JOBS)
    # Without the cast, adapters run in the base's dtype, as they are served.
    uncast = {"autocast_adapter_dtype": False}
    folder = out / "adapters"
    model = PeftModel.from_pretrained(base, folder / first, adapter_name=first, **uncast)
    for name in others:
        model.load_adapter(folder / name, adapter_name=name, **uncast)
    return model.eval()


@torch.no_grad()
def answers(
    model: PeftModel, tokenizer: PreTrainedTokenizerFast, job: Job, words: list[str]
) -> list[str]:
    """Greedy answers of `job`'s adapter, or of the plain base, to all `words` in one batch."""
    inputs = tokenizer([jobs.prompt(word) for word in words], padding=True, return_tensors="pt")
    with model.disable_adapter() if job.adapter is None else nullcontext():
        if job.adapter is not None:
            model.set_adapter(job.name)
        ids = model.generate(**inputs, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
    new_ids = ids[:, inputs["input_ids"].shape[1] :]
    return list(tokenizer.batch_decode(new_ids, skip_special_tokens=True))


def exact_match(
    model: PeftModel, tokenizer: PreTrainedTokenizerFast, job: Job, words: list[str]
) -> float:
    """The share of `words` that `job` answers exactly right."""
    pairs = zip(words, answers(model, tokenizer, job, words), strict=True)
    return sum(answer == jobs.expected(job, word) for word, answer in pairs) / len(words)


def evaluate(out: Path, console: Console) -> bool:
    """Print how well the saved files do on held-out words; True if every job reaches its bar."""
    table = Table("job", "rank", "exact in fp32", "exact in bf16")
    in_fp32, in_bf16 = load_all(out, torch.float32), load_all(out, torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    good = True
    for job in jobs.JOBS:
        words = jobs.held_out(job, EVALUATED_WORDS, EVALUATION_SEED)
        scores = [exact_match(model, tokenizer, job, words) for model in (in_fp32, in_bf16)]
        good = good and min(scores) >= MIN_EXACT[kind(job)]
        rank = str(job.adapter.rank) if job.adapter else ""
        table.add_row(job.name, rank, *(f"{score:.1%}" for score in scores))
    console.print(table)
    return good


def train(out: Path, console: Console) -> bool:
    """Train and save everything under `out`, then measure it; True if every job reaches its bar."""
    columns = [
        TextColumn("{task.description:20}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} loss {task.fields[loss]:.4f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console) as progress:
        tokenizer = train_base(out, progress)
        for job in jobs.ADAPTER_JOBS:
            train_adapter(out, tokenizer, job, progress)
    for file in out.rglob("*.safetensors"):
        file.chmod(0o644)  # safetensors writes for the owner alone
    return evaluate(out, console)


def quiet_libraries() -> None:
    """Leave the terminal to our own progress bars."""
    transformers_logging.disable_progress_bar()
    # PEFT 0.21 asks transformers under a name that transformers 5.23 has renamed.
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)


def main() -> int:
    """Parse the arguments, train, and return the exit status."""
    parser = argparse.ArgumentParser(description="Train the demo's model and its eight adapters.")
    parser.add_argument("--out", type=Path, default=ASSETS, help="where to write (%(default)s)")
    quiet_libraries()
    good = train(parser.parse_args().out, Console())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
