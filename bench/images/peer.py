"""transformers and PEFT, in a process of their own.

    python -m bench.images.peer

It reads messages from standard input and answers on standard output.
"""

from __future__ import annotations

import base64
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from PIL import Image

from bench.images.model import QUESTION
from bench.systems.serve import serve, take_standard_output


class Peer:
    """Answers `load`, and then `run`: a batch of images, with the name of each one's adapter; ""
    is the model."""

    def __init__(self) -> None:
        self._model: Any = None
        self._processor: Any = None

    def answer(self, message: dict[str, Any]) -> Any:
        if message["action"] == "load":
            dtype = getattr(torch, message["dtype"])
            folder, adapters = Path(message["model_dir"]), message["adapters"]
            return self._load(folder, adapters, message["tokens"], dtype)
        began_s = time.perf_counter()
        files = [base64.b64decode(each) for each in message["files"]]
        tokens = self._run(files, message["adapters"], message["count"])
        return {"seconds": time.perf_counter() - began_s, "tokens": tokens}

    def _load(
        self, model_dir: Path, adapters: dict[str, str], tile_tokens: int, dtype: torch.dtype
    ) -> None:
        kind = transformers.SmolVLMForConditionalGeneration
        model: Any = kind.from_pretrained(model_dir, dtype=dtype)
        for index, (name, folder) in enumerate(adapters.items()):
            if index:
                model.load_adapter(folder, name)
            else:
                model = peft.PeftModel.from_pretrained(model, folder, adapter_name=name)
        self._model = model.eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
        images = transformers.AutoImageProcessor.from_pretrained(model_dir, use_fast=False)
        self._processor = transformers.Idefics3Processor(
            images, tokenizer, image_seq_len=tile_tokens
        )

    @torch.inference_mode()
    def _run(self, files: list[bytes], adapters: list[str], count: int) -> list[list[int]]:
        """Returns the greedy tokens of one batch."""
        content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
        text = self._processor.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        images = [[Image.open(BytesIO(each)).convert("RGB")] for each in files]
        inputs = self._processor(
            text=[text] * len(files),
            images=images,
            add_special_tokens=False,
            return_tensors="pt",
        ).to(self._model.dtype)
        options: dict[str, Any] = {"max_new_tokens": count, "do_sample": False}
        if len(set(adapters)) > 1:
            options["adapter_names"] = adapters  # PEFT's mixed batches
            out = self._model.generate(**inputs, **options)
        elif adapters[0]:
            self._model.set_adapter(adapters[0])
            out = self._model.generate(**inputs, **options)
        else:
            with self._model.disable_adapter():
                out = self._model.generate(**inputs, **options)
        found: list[list[int]] = out[:, inputs["input_ids"].shape[1] :].tolist()
        return found


if __name__ == "__main__":
    serve(Peer().answer, take_standard_output())
