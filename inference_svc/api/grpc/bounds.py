"""Limits of each RPC's request, checked before it is converted."""

from __future__ import annotations

from inference_svc.api.generate_call import (
    MAX_MESSAGES,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_VARIABLES,
)
from inference_svc.api.grpc.uploads import MAX_CHUNK_BYTES
from inference_svc.api.pooling.call import MAX_INPUT_TOKENS, MAX_INPUTS
from inference_svc.api.service import TRACE_CHUNK_BYTES
from inference_svc.api.tools import MAX_TOOLS
from inference_svc.core import MAX_PARTS
from inference_svc.grammars.grammar import MAX_CHOICE_TEXTS
from loadout.inference.v1 import inference_pb2 as pb
from servicekit.rpc.requests import SMALL_BYTES, RequestBounds, RequestTable

MAX_GENERATE_BYTES = 4 << 20
"""Holds a million tokens, as ids or as text, and the additions of each message of a chat."""
MAX_UPLOADS = 16
"""Each has a message in memory while it arrives, in addition to the room for its file."""
DEBUG_BYTES = 2 << 20
"""The largest part of a debug bundle has a thousand rows."""

TOKENS_BYTES = 8 << 20
"""A million tokens, or their text, sent and copied."""

VECTOR_BYTES = 128 << 10
"""A vector of 16,384 numbers, sent and copied."""

RESIDENTS_BYTES = 1 << 20
"""A thousand adapters with five names each, sent and copied."""

ADAPTER_BYTES = 4 << 20
"""An adapter of 18,000 targets, sent and copied."""


# The limits themselves are told by name.
_INPUTS = {
    "inputs": 2 * MAX_INPUTS,
    "inputs.token_ids.ids": 2 * MAX_INPUT_TOKENS,
    "adapters": 2 * MAX_PARTS,
}
EMBED, CLASSIFY = (
    RequestBounds(message, MAX_GENERATE_BYTES, max_items=_INPUTS, answer_bytes=VECTOR_BYTES)
    for message in (pb.EmbedRequest, pb.ClassifyRequest)
)
RESIDENTS = RequestBounds(pb.ListResidentAdaptersRequest, answer_bytes=RESIDENTS_BYTES)
UPLOAD = RequestBounds(
    pb.UploadImageRequest, MAX_CHUNK_BYTES + SMALL_BYTES, max_running=MAX_UPLOADS
)
SCORE = RequestBounds(
    pb.ScoreRequest,
    MAX_GENERATE_BYTES,
    max_items={"documents": 2 * MAX_INPUTS, "adapters": 2 * MAX_PARTS},
)


def request_bounds(max_model_len: int) -> RequestTable:
    """`max_model_len` bounds the tokens of a prompt: a prompt that is a little too long is refused
    later, by its number of tokens."""
    chat = {
        "chat.messages": MAX_MESSAGES,
        "chat.messages.tool_calls": MAX_MESSAGES,
        "chat.messages.images": MAX_MESSAGES,
        "chat.tools": MAX_TOOLS,
        "chat.chat_template_kwargs": MAX_VARIABLES,
    }
    generate = RequestBounds(
        pb.GenerateRequest,
        MAX_GENERATE_BYTES,
        max_items={
            "token_ids.ids": 2 * max_model_len,
            **chat,
            "adapters": 2 * MAX_PARTS,  # the limit itself is told by name
            "sampling.stop": MAX_STOPS,
            "sampling.stop_token_ids": MAX_STOP_TOKEN_IDS,
            "sampling.structure.choice.texts": MAX_CHOICE_TEXTS,
        },
    )
    return {
        "Generate": generate,
        "UploadImage": UPLOAD,
        "Embed": EMBED,
        "Score": SCORE,
        "Classify": CLASSIFY,
        "Tokenize": RequestBounds(
            pb.TokenizeRequest, MAX_GENERATE_BYTES, max_items=chat, answer_bytes=TOKENS_BYTES
        ),
        "Detokenize": RequestBounds(
            pb.DetokenizeRequest,
            MAX_GENERATE_BYTES,
            max_items={"token_ids": 2 * max_model_len},
            answer_bytes=TOKENS_BYTES,
        ),
        "ListResidentAdapters": RESIDENTS,
        "InspectAdapter": RequestBounds(pb.InspectAdapterRequest, answer_bytes=ADAPTER_BYTES),
        "LoadAdapter": RequestBounds(pb.LoadAdapterRequest),
        "UnloadAdapter": RequestBounds(pb.UnloadAdapterRequest),
        "PinAdapter": RequestBounds(pb.PinAdapterRequest),
        "UnpinAdapter": RequestBounds(pb.UnpinAdapterRequest),
        "PauseGeneration": RequestBounds(pb.PauseGenerationRequest),
        "ResumeGeneration": RequestBounds(pb.ResumeGenerationRequest),
        "Sleep": RequestBounds(pb.SleepRequest),
        "Wake": RequestBounds(pb.WakeRequest),
        "GetServerInfo": RequestBounds(pb.GetServerInfoRequest),
        "GetDebugInfo": RequestBounds(pb.GetDebugInfoRequest, answer_bytes=DEBUG_BYTES),
        "ProfileSteps": RequestBounds(pb.ProfileStepsRequest, answer_bytes=2 * TRACE_CHUNK_BYTES),
    }
