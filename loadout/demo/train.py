"""Train the demo's model and adapters from nothing: `python -m loadout.demo.train [--out DIR]`.

The base learns to copy a word; every adapter is then trained on the saved base. What is written
is ordinary Hugging Face and PEFT format. The run ends by measuring the saved files on held-out words
and fails if a job is below its bar.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from loadout.demo import jobs
from loadout.demo.jobs import AdapterSpec, Job

ASSETS = Path(__file__).parent / "assets"
SEED = 7
BATCH_SIZE = 128
LEARNING_RATE = {"base": 3e-3}
ADAPTER_LEARNING_RATE = 4e-3
STEPS = {"base": 3000}
ADAPTER_STEPS = 1000
WARMUP_STEPS = 50
MAX_GRAD_NORM = 1.0
STORED_DTYPE = torch.bfloat16
EVALUATION_WORDS = 500
MIN_EXACT = {"base": 0.99}
MIN_ADAPTER_EXACT = 0.97
MAX_ANSWER_TOKENS = 2 * jobs.MAX_LETTERS + 1
IGNORED_LABEL = -100
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
PAD, BOS, EOS, UNK = SPECIAL_TOKENS
CHAT_TEMPLATE = "{{ bos_token }}{{ messages[-1]['content'] }}" + jobs.SEPARATOR

SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}


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


def encode(
    tokenizer: PreTrainedTokenizerFast, job: Job, words: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both [words, longest]; only the answer and its end are labelled."""
    ids, labels = [], []
    for word in words:
        prompt = tokenizer.encode(jobs.prompt(word))
        answer = tokenizer.encode(jobs.expected(job, word), add_special_tokens=False)
        answer.append(tokenizer.eos_token_id)
        ids.append(torch.tensor(prompt + answer))
        labels.append(torch.tensor([IGNORED_LABEL] * len(prompt) + answer))
    pad = torch.nn.utils.rnn.pad_sequence
    return (
        pad(ids, batch_first=True, padding_value=tokenizer.pad_token_id),
        pad(labels, batch_first=True, padding_value=IGNORED_LABEL),
    )


def batches(tokenizer, job, seed):
    words = jobs.training_words(job, seed)
    while True:
        yield encode(tokenizer, job, list(islice(words, BATCH_SIZE)))


def learning_rate_factor(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def fit(model, tokenizer, job, steps, rate, report=lambda *a: None):
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step, (ids, labels) in enumerate(islice(batches(tokenizer, job, SEED), steps)):
        for group in optimizer.param_groups:
            group["lr"] = rate * learning_rate_factor(step, steps)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        targets = labels[:, 1:]
        mask = targets != IGNORED_LABEL
        loss = torch.nn.functional.cross_entropy(logits[mask], targets[mask])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        exact = ((logits.argmax(-1) == targets) | ~mask).all(1).float().mean()
        report(step, loss.item(), exact.item())
