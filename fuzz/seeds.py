"""`python -m fuzz.seeds` writes seeds into the corpus, for targets with inputs in binary form.

Each seed is accepted. Run this again after you change the form of an input.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from PIL import Image as Pillow
from safetensors.torch import save

from contract.images.expert_index import INDEX_BYTES
from contract.images.header import GRANULE_BYTES, align
from contract.images.targets import TargetKind
from contract.tokenizer_extract import make_extract
from fuzz.campaign import CORPUS, MAX_INPUT_BYTES_OF
from fuzz.format_2 import EXPERTS, SEPARATOR, SERVED
from fuzz.texts import base_folder
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from loadout.inference.v1 import inference_pb2
from tests.support.models.saved_weights import CASES, library
from tests.support.pictures.files import encoded, picture, png

LORA = (CORPUS / "checkpoint" / "lora").read_bytes()
CONFIG, _, WEIGHTS = LORA.partition(SEPARATOR)
BLOB = "../../blobs/"

# --- images -------------------------------------------------------------------------------------


class Image:
    """Builds an image segment by segment."""

    def __init__(self, image_format: int = 2) -> None:
        self._header = pb.ImageHeader(image_id="1" * 64, image_format=image_format)
        self._content = bytearray()
        names = [SERVED.all_targets[index].name for index in SERVED.order_of_use]
        self._places = {name.rpartition("layers.0.")[2]: at for at, name in enumerate(names)}

    def add(
        self, target: str, kind: str, values: np.ndarray, rank: int = 0, shape: Sequence[int] = ()
    ) -> None:
        data = values.tobytes()
        dtypes = {"float32": pb.DATA_TYPE_FLOAT32, "int32": pb.DATA_TYPE_INT32}
        self._header.segments.add(
            target=self._places[target],
            kind=pb.SegmentKind.Value(f"SEGMENT_KIND_{kind.upper()}"),
            rank=rank,
            offset=len(self._content),
            length_bytes=len(data),
            dtype=dtypes.get(str(values.dtype), pb.DATA_TYPE_FLOAT32),
            shape=shape or values.shape,
        )
        self._content += data.ljust(align(len(data)), b"\0")

    def lora(self, target: str, rank: int) -> None:
        """Adds A and B."""
        found = next(each for each in SERVED.targets if each.name.endswith(target))
        a = (found.in_features, rank)
        self.add(target, "a", _values(a if found.kind is TargetKind.EMBEDDING else a[::-1]), rank)
        self.add(target, "b", _values((rank, found.out_features)), rank)

    def experts(self, target: str, ranks: Sequence[int]) -> None:
        """Adds A and B of experts, each as an index and the matrices after it."""
        found = next(each for each in SERVED.targets if each.name.endswith(target))
        for kind, features in (("a", found.in_features), ("b", found.out_features)):
            start = align(EXPERTS * INDEX_BYTES)
            index, matrices = b"", b""
            for rank in ranks:
                granule = (start + len(matrices)) // GRANULE_BYTES if rank else 0
                index += struct.pack("<iifi", granule, rank, 1.0, 0)
                data = _values((rank, features)).tobytes()
                matrices += data.ljust(align(len(data)), b"\0")
            content = np.frombuffer(index.ljust(start, b"\0") + matrices, np.uint8)
            self.add(target, kind, content, max(ranks), (EXPERTS, features))

    def to_bytes(self) -> bytes:
        self._header.total_bytes = len(self._content)
        return self._header.SerializeToString() + SEPARATOR + bytes(self._content)


def _values(shape: Sequence[int]) -> np.ndarray:
    return np.full(shape, 0.5, np.float32)


def images() -> Iterator[tuple[str, bytes]]:
    """Yields images with every kind of segment."""
    lora, experts, replaced, whole = Image(), Image(), Image(), Image()
    lora.lora("model.embed_tokens", 2)
    lora.lora("self_attn.q_proj", 2)
    lora.add("self_attn.q_proj", "bias", _values([8]))
    lora.add("self_attn.q_proj", "magnitude", _values([8]))
    yield "lora", lora.to_bytes()
    experts.experts("mlp.experts.up_proj", [2, 0, 1, 2])
    experts.experts("mlp.experts.down_proj", [1, 1, 1, 1])
    yield "experts", experts.to_bytes()
    replaced.add("model.embed_tokens", "row_ids", np.array([1, 8, 10], np.int32))
    replaced.add("model.embed_tokens", "rows", _values([3, 4]))
    replaced.add("input_layernorm", "full", _values([4]))
    replaced.add("self_attn.q_proj.bias", "full", _values([8]))
    yield "rows", replaced.to_bytes()
    whole.lora("self_attn.k_proj", 1)
    whole.add("lm_head", "full", _values([8, 4]))
    yield "whole", whole.to_bytes()
    yield "empty", Image().to_bytes()


# --- folders and uploads ------------------------------------------------------------------------


def folders() -> Iterator[tuple[str, bytes]]:
    config, weights = b"adapter_config.json\0", b"adapter_model.safetensors\0"
    good = [b"f" + config + CONFIG, b"f" + weights + WEIGHTS]
    linked = [
        b"l" + config + (BLOB + "a" * 64).encode(),
        b"l" + weights + (BLOB + "b" * 64).encode(),
    ]
    beside = [
        *(b"ptokenizer.json\0", b"dcheckpoint-1\0", b"usocket\0", b"freadme\n\0text"),
        *(b"s\xff.bin\0001 ", b"lchat_template.jinja\0../../../secret"),
    ]
    yield "plain", SEPARATOR.join(good)
    yield "cache", SEPARATOR.join(linked)
    yield "texts", SEPARATOR.join([*good, b"fchat_template.jinja\0hello", b"ftokenizer.json\0{}"])
    yield "beside", SEPARATOR.join([*good, *beside])
    yield "secret", SEPARATOR.join([b"l" + config + (BLOB + "c" * 64).encode(), good[1]])
    yield "pipe", SEPARATOR.join([good[0], b"l" + weights + (BLOB + "d" * 64).encode()])
    yield "out", SEPARATOR.join([b"l" + config + b"../../../secret.json", good[1]])
    sparse = b"s" + weights + b"1099511627776 " + WEIGHTS
    yield "sparse", SEPARATOR.join([good[0], sparse])
    shard = b"adapter_model-00001-of-00001.safetensors"
    names = sorted(_names(WEIGHTS))
    index = json.dumps({"weight_map": dict.fromkeys(names, shard.decode())}).encode()
    yield (
        "shards",
        SEPARATOR.join(
            [
                *(good[0], b"fadapter_model.safetensors.index.json\0" + index),
                b"f" + shard + b"\0" + WEIGHTS,
            ]
        ),
    )


def _names(weights: bytes) -> set[str]:
    length = int.from_bytes(weights[:8], "little")
    return {name for name in json.loads(weights[8 : 8 + length]) if name != "__metadata__"}


def uploads() -> Iterator[tuple[str, bytes]]:
    meta = pb.UploadAdapterRequest(meta=pb.UploadMeta(name="team/adapter", labels={"a": "b"}))
    half = len(WEIGHTS) // 2
    files = {"adapter_config.json": [CONFIG], "adapter_model.safetensors": [WEIGHTS]}
    cut = {
        "adapter_model.safetensors": [WEIGHTS[:5], WEIGHTS[5:half], WEIGHTS[half:]],
        "adapter_config.json": [CONFIG[:3], CONFIG[3:]],
        "readme.md": [b"hello"],
        "chat_template.jinja": [b"{{ x }}", b""],
    }
    for name, chosen in (("whole", files), ("cut", cut)):
        messages = [meta.SerializeToString(), *_chunks(chosen)]
        yield name, b"m" + SEPARATOR.join(messages)
        yield f"{name}_on_disk", b"d" + SEPARATOR.join(messages)
    (first, second), (third, *_rest) = list(_chunks(files)), list(_chunks(cut))
    yield "twice", b"m" + SEPARATOR.join([meta.SerializeToString(), first, second, third])


def _chunks(files: dict[str, list[bytes]]) -> Iterator[bytes]:
    for name, pieces in files.items():
        offset = 0
        for piece in pieces:
            chunk = pb.FileChunk(file_name=name, offset=offset, data=piece)
            yield pb.UploadAdapterRequest(chunk=chunk).SerializeToString()
            offset += len(piece)


# --- texts and requests -------------------------------------------------------------------------


def _tokenizer_files() -> tuple[bytes, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        base = base_folder(Path(folder))
        files = [(base / name) for name in ("tokenizer.json", "tokenizer_config.json")]
        first, second = (file.read_bytes() for file in files)
        return first, second


def tokenizers() -> Iterator[tuple[str, bytes]]:
    tokenizer, config = _tokenizer_files()
    yield "bytes", tokenizer + SEPARATOR + config
    small = {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
        "added_tokens": [{"id": 3, "content": "<x>", "special": True}],
        "pre_tokenizer": {"type": "Metaspace", "replacement": "_", "add_prefix_space": True},
    }
    settings = {
        "added_tokens_decoder": {"4": {"content": "<y>", "lstrip": True}},
        "extra_special_tokens": ["<z>"],
        "eos_token": {"content": "<x>"},
        "chat_template": [{"name": "default", "template": "{{ messages }}"}],
        "add_bos_token": True,
    }
    roles = {"bos_token": "<s>", "additional_special_tokens": ["<t>"]}
    yield "small", _joined(small, settings)
    yield "roles", _joined(small, {}, roles)
    unigram = {**small, "model": {"type": "Unigram", "vocab": [["a", -1.5], ["b", -2]]}}
    yield "unigram", _joined(unigram, {"pad_token": "a"})


def pictures() -> Iterator[tuple[str, bytes]]:
    """Yields small files of every format that is decoded, and of kinds that are refused."""
    found = picture(20, 13)
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        yield kind.lower(), encoded(found, kind)
    exif = Pillow.Exif()
    exif[0x0112] = 6
    yield "turned", encoded(found, "JPEG", exif=exif)
    yield "transparent", encoded(picture(9, 21, "LA"))
    yield "palette", encoded(found.quantize(16))
    yield "cmyk", encoded(picture(12, 11, "CMYK"), "JPEG")
    yield "progressive", encoded(found, "JPEG", progressive=True)
    other = [picture(20, 13, seed=1)]
    yield "two_of_a_camera", encoded(found, "MPO", save_all=True, append_images=other)
    yield "animated", encoded(found, "PNG", save_all=True, append_images=other)
    yield "wide_values", png(3, 2, 16, 6, bytes(range(25)) * 2)
    yield "long", encoded(picture(80, 3))


def _joined(*files: object) -> bytes:
    return SEPARATOR.join(json.dumps(each).encode() for each in files)


def extracts() -> Iterator[tuple[str, bytes]]:
    tokenizer, config = map(json.loads, _tokenizer_files())
    yield "same", make_extract(tokenizer, config).to_bytes()
    token = {"id": 258, "content": "<tool>", "special": False, "normalized": True}
    tokenizer["added_tokens"].append(token)
    yield "one_more", make_extract(tokenizer, config).to_bytes()
    more = {"content": "<|user|>", "special": True, "lstrip": True, "single_word": True, "id": 259}
    tokenizer["added_tokens"].append(more)
    ended = {**config, "eos_token": "<|user|>", "add_bos_token": True}
    yield "two_more", make_extract(tokenizer, ended).to_bytes()


# --- GGUF files ---------------------------------------------------------------------------------


def gguf_files() -> Iterator[tuple[str, bytes]]:
    """Yields files of every family, with all types of blocks, splits and kinds of tokenizers."""
    letters = [*"abcdef", "\u0120"]
    words: dict[str, Any] = {
        "tokens": [*letters, "ab", "<s>", "</s>", "<think>"],
        "token_type": [1] * 8 + [3, 3, 4],
        "merges": ["a b"],
        "bos_token_id": 8,
        "eos_token_id": 9,
    }
    byte_level = {"model": "gpt2", "pre": "qwen2", **words}
    scored = {**words, "model": "llama", "scores": [-float(each) for each in range(11)]}
    scored = {**scored, "add_space_prefix": True, "add_bos_token": True, "unknown_token_id": 8}
    del scored["merges"]
    yield "llama", _gguf("llama", "Q4_K Q6_K Q8_0", {**byte_level, "pre": "llama-bpe"})
    yield "scored", _gguf("llama", "Q4_0 Q4_1 Q5_0 Q5_1", scored)
    yield "qwen2", _gguf("qwen2", "Q5_K F16", byte_level)
    yield "qwen3", _gguf("qwen3", "BF16 F32", {**byte_level, "pre": "smollm"})
    yield "gemma2", _gguf("gemma2", "Q8_0", scored)
    yield "gemma3", _gguf("gemma3", "Q6_K Q4_0", {**scored, "tokens": ["  ", *words["tokens"][1:]]})


def packed_weights() -> Iterator[tuple[str, bytes]]:
    """Yields weights that libraries saved, with the configs that they wrote: one for each set of
    tensors."""
    seen = set()
    for name, case in CASES:
        config, tensors = library(name)[0][case], dict(library(name)[1][case])
        sizes, dtype = list(tensors.pop("expected").shape), case.rpartition(" ")[2]
        whole = {"sizes": sizes, "config": {"quantization_config": config, "dtype": dtype}}
        data = json.dumps(whole).encode() + SEPARATOR + save(tensors)
        kind = (name, *((end, each.dtype) for end, each in sorted(tensors.items())))
        if kind not in seen and len(data) <= MAX_INPUT_BYTES_OF["packed"]:
            seen.add(kind)
            yield f"{name} {case}".replace(" ", "_"), data


def _gguf(architecture: str, kinds: str, tokenizer: Mapping[str, Any]) -> bytes:
    """Returns a model of one layer with one head, whose matrices have these types in turn, and as
    few rows as are read."""
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 32}
    sizes |= {"feed_forward_length": 32, "attention.head_count": 1, "attention.key_length": 32}
    if architecture.startswith("gemma"):
        sizes["attention.sliding_window"] = 8
    values: dict[str, Any] = {f"{architecture}.{key}": value for key, value in sizes.items()}
    values[f"{architecture}.attention.layer_norm_rms_epsilon"] = 1e-5
    values |= {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    values["tokenizer.chat_template"] = "{{ messages }}"
    types = [gguf.GGMLQuantizationType[each] for each in kinds.split()]
    [arch] = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.gguf")
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in values.items():
            _ADDERS[type(value)](writer, key, value)
        for number, tensor in enumerate(gguf.MODEL_TENSORS[arch]):
            name = gguf.TENSOR_NAMES[tensor].format(bid=0) + ".weight"
            if "norm" in name:
                writer.add_tensor(name, np.ones(32, np.float32))
            elif name == "rope_freqs.weight":
                writer.add_tensor(name, np.ones(16, np.float32))
            elif "rot_embd" not in name and "exp" not in name and "gate_inp" not in name:
                _add_matrix(writer, name, types[number % len(types)])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def _add_matrix(writer: gguf.GGUFWriter, name: str, kind: gguf.GGMLQuantizationType) -> None:
    rows = 11 if name == "token_embd.weight" else 2
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.full((rows, max(1, 32 // size) * num_bytes), 1, np.uint8)
    writer.add_tensor(name, blocks, raw_dtype=kind)


_ADDERS: Mapping[type, Callable[[gguf.GGUFWriter, str, Any], None]] = {
    bool: gguf.GGUFWriter.add_bool,
    int: gguf.GGUFWriter.add_uint32,
    float: gguf.GGUFWriter.add_float32,
    str: gguf.GGUFWriter.add_string,
    list: gguf.GGUFWriter.add_array,
}


def http_requests() -> Iterator[tuple[str, bytes]]:
    common = {
        "model": "lora", "n": 2, "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 7,
        "min_p": 0.1, "seed": 3, "stop": ["x"], "stop_token_ids": [4], "min_tokens": 1,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1,
        "logprobs_mode": "processed_logprobs", "ignore_eos": False, "priority": -1,
        "cache_salt": "s", "min_revision": 3, "version_policy": "follow_keep",
        "return_routed_experts": True, "return_token_ids": True,
    }  # fmt: skip
    parts = {"adapters": [{"ref": "a", "scale": 0.5}, {"ref": "b@2", "scale": -1}]}
    said = [{"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "me"}]
    chat = {"messages": said, "logprobs": True, "top_logprobs": 2, "metadata": {"a": "b"}}
    completion = {"prompt": [[1, 2], [3]], "logprobs": 3, "echo": False, "user": "me"}
    sampling = {"max_tokens": 4, "logprobs": 2, "prompt_logprobs": 5, "top_k": -1}
    tokens = {"token_ids": [1, 7, 8, 2], "sampling_params": sampling, "model": "loras"}
    scored = {"model": "base", "prompt": "text", "max_tokens": 0, "prompt_logprobs": 2, **parts}
    echoed = {"model": "base", "prompt": "text", "max_tokens": 0, "echo": True, "logprobs": 1}
    streamed = {**chat, "model": "base", "stream": True, "stream_options": {"include_usage": True}}
    follow = {**completion, "model": "lora", "version_policy": "follow_recompute"}
    yield "chat", _post("/v1/chat/completions", {**common, **chat})
    yield "stream", _post("/v1/chat/completions", streamed)
    answered = [{"role": "developer", "content": "a"}, {"role": "assistant", "reasoning": "b"}]
    continued = {"messages": answered, "model": "base", "continue_final_message": True}
    yield "continued", _post("/v1/chat/completions", {**continued, "add_special_tokens": True})
    yield "completion", _post("/v1/completions", {**common, **completion})
    yield "scored", _post("/v1/completions", scored)
    yield "echoed", _post("/v1/completions", echoed)
    yield "follow", _post("/v1/completions", follow)
    yield "tokens", _post("/inference/v1/generate", {**tokens, "request_id": "r"})
    load = {"lora_name": "a", "lora_path": "/a b", "base_model": "b", "pin": True}
    yield "load", _post("/v1/load_lora_adapter", {**load, "load_inplace": True})
    yield "unload", _post("/v1/unload_lora_adapter", {"lora_name": "a", "lora_int_id": 1})
    yield "pause", _post("/pause?mode=wait&resume_after_seconds=3&clear_cache=true", {})
    yield "sleep", _post("/sleep?level=1&mode=keep", {})
    yield "wake", _post("/wake_up?tags=weights&tags=kv_cache", {})
    yield "resume", _post("/resume", {})
    yield "reset", _post("/reset_prefix_cache", {})
    yield "weights", _post("/update_weights", {})
    yield "models", b"GET /v1/models?limit=3&page_token=x" + SEPARATOR
    yield "model", b"GET /v1/models/base" + SEPARATOR
    yield "info", b"GET /server_info?config_format=json" + SEPARATOR


def _post(path: str, body: object) -> bytes:
    return f"POST {path}".encode() + SEPARATOR + json.dumps(body).encode()


def inference_requests() -> Iterator[tuple[str, bytes]]:
    ipb = inference_pb2
    sampling = ipb.SamplingParams(
        max_tokens=3, min_tokens=1, temperature=0.5, top_k=4, top_p=0.5, min_p=0.1, seed=9,
        stop=["x"], stop_token_ids=[3], presence_penalty=1, repetition_penalty=1.2, logprobs=1000,
        logprobs_mode=ipb.LOGPROBS_MODE_PROCESSED, prompt_logprobs=20,
    )  # fmt: skip
    summed = ipb.GenerateRequest(
        text="hello", sampling=sampling, packed_logprobs=True, n=3, priority=-2, cache_salt="s",
        adapters=[
            ipb.AdapterPart(ref="a", scale=0.5), ipb.AdapterPart(ref="b@2"),
            ipb.AdapterPart(ref="team/c", scale=-3),
        ],
    )  # fmt: skip
    followed = ipb.GenerateRequest(
        token_ids=ipb.TokenIds(ids=[1, 7, 8, 9]), adapter="loras", min_revision=4,
        version_policy=ipb.VERSION_POLICY_FOLLOW_RECOMPUTE, return_routed_experts=True,
    )  # fmt: skip
    echoed = ipb.GenerateRequest(
        text="a", echo=True, sampling=ipb.SamplingParams(max_tokens=0, logprobs=3)
    )
    pause = ipb.PauseGenerationRequest(mode=ipb.PAUSE_MODE_WAIT, resume_after_seconds=2.5)
    upload = ipb.UploadImageRequest(upload=ipb.ImageUpload(size_bytes=6, cache_salt="salt"))
    for name, request in (("upload", upload), ("piece", ipb.UploadImageRequest(chunk=b"a file"))):
        yield name, b"UploadImage" + SEPARATOR + request.SerializeToString()
    yield "sum", b"Generate" + SEPARATOR + summed.SerializeToString()
    yield "follow", b"Generate" + SEPARATOR + followed.SerializeToString()
    yield "echo", b"Generate" + SEPARATOR + echoed.SerializeToString()
    yield "pause", b"PauseGeneration" + SEPARATOR + pause.SerializeToString()


SEEDS = {
    "image": images,
    "folder": folders,
    "upload": uploads,
    "tokenizer": tokenizers,
    "extract": extracts,
    "http": http_requests,
    "gguf": gguf_files,
    "packed": packed_weights,
    "inference_request": inference_requests,
    "picture": pictures,
}


def main() -> None:
    for target, seeds in SEEDS.items():
        (CORPUS / target).mkdir(exist_ok=True)
        for name, data in seeds():
            (CORPUS / target / name).write_bytes(data)


if __name__ == "__main__":
    main()
