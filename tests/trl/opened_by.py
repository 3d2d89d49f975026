"""transformers or vLLM opens a checkpoint, in the environment of `bench.peers.install vllm`.

    python -m tests.trl.opened_by transformers|vllm FOLDER OUT < ASKED

ASKED has the prompts' token ids as JSON, and the file OUT gets the greedy answers. transformers, in
fp32, takes answers, too, and returns by how much the logit of each of their tokens is below the
highest, and by how much the logits there change at most if it computes in bf16. vLLM names the
kernel of each layer that is quantised.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NUM_TOKENS = 24

Tokens = Sequence[Sequence[int]]


def by_transformers(folder: str, prompts: Tokens, answers: Tokens) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    def logits_of(model: Any) -> list[Any]:
        """Returns the logits of the answers' tokens, in fp32."""
        found = []
        for prompt, answer in zip(prompts, answers, strict=False):
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *answer]])).logits
            found.append(logits[0, len(prompt) - 1 : -1].float())
        return found

    def opened(dtype: torch.dtype) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    model = opened(torch.float32)
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        ids = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
        found.append(ids[0, len(prompt) :].tolist())
    if not answers:
        return {"answers": found}
    exact, rounded = logits_of(model), logits_of(opened(torch.bfloat16))
    gaps = [
        (logits.amax(dim=1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]).tolist()
        for logits, answer in zip(exact, answers, strict=True)
    ]
    changes = [float((one - other).abs().max()) for one, other in zip(exact, rounded, strict=True)]
    return {"answers": found, "gaps": gaps, "change": max(changes)}


def by_vllm(folder: str, prompts: Tokens) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    from tests.trl.vllm_kernels import add_missing, kernels_of

    add_missing()
    llm = LLM(
        folder,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=len(prompts),
        enforce_eager=True,
        gpu_memory_utilization=0.1,  # of the machine's memory, on a CPU
    )
    params = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False
    )
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.generate(asked, params, use_tqdm=False)
    (kernels,) = llm.apply_model(kernels_of)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    return {"answers": answers, "kernels": kernels}


def main(peer: str, folder: str, out: str) -> None:
    asked = json.load(sys.stdin)
    prompts, answers = asked["prompts"], asked.get("answers", ())
    if peer == "vllm":
        found = by_vllm(folder, prompts)
    else:
        found = by_transformers(folder, prompts, answers)
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
