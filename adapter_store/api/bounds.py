"""Limits of each RPC's request, checked before it is converted."""

from __future__ import annotations

from adapter_store.api.convert import read_chunk
from adapter_store.catalog.names import PAGE_BYTES
from adapter_store.catalog.tables.filters import MAX_FILTER_CHARS, MAX_LABELS
from adapter_store.images.plan.announcement import MAX_ALIASES, MAX_LORA_TARGETS, MAX_SEGMENT_KINDS
from adapter_store.images.pull import CHUNK_BYTES
from contract.images.layout_rules import MAX_ALL_HASHES, MAX_ALL_OTHER_NAMES, MAX_TARGETS
from contract.tokenizer_extract import MAX_EXTRACT_BYTES
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from servicekit.rpc.requests import RequestBounds, RequestTable

MAX_LAYOUT_BYTES = 8 << 20
"""The largest model that we know of, Kimi K2, has 70,000 targets if each expert's matrix is one:
6 MB. Layouts of dense models have at most 200 KB, most of it hashes of the base's weights."""
MAX_CHUNK_BYTES = 4 << 20
"""Of an upload; clients send 512 KiB."""
MAX_TENANTS = 1024
MAX_TOKEN_CHARS = 8192
"""Of a page token, which repeats the filter."""
MAX_IMAGE_FORMATS = 64
MAX_EXPORTS = 16
"""Each reads and hashes a source, and takes memory of its own for it."""
DEBUG_BYTES = 2 << 20
"""The largest part of a debug bundle has a thousand rows."""
RECORD_BYTES = 128 << 10
"""The memory of an answer of one record, sent and copied."""
PAGE_ANSWER_BYTES = 2 * (PAGE_BYTES + RECORD_BYTES)
PULL_ANSWER_BYTES = 3 * CHUNK_BYTES
"""A chunk of at most half more than CHUNK_BYTES, and gRPC's copy."""
TEXT_ANSWER_BYTES = 2 * MAX_EXTRACT_BYTES
"""The largest extract of a tokenizer, and gRPC's copy."""

REQUESTS: RequestTable = {
    "RegisterAdapter": RequestBounds(
        pb.RegisterAdapterRequest, max_items={"labels": MAX_LABELS}, answer_bytes=RECORD_BYTES
    ),
    "UploadAdapter": RequestBounds(
        pb.UploadAdapterRequest,
        MAX_CHUNK_BYTES,
        max_items={"meta.labels": MAX_LABELS},
        answer_bytes=RECORD_BYTES,
        read_direct=read_chunk,
    ),
    "GetAdapter": RequestBounds(
        pb.GetAdapterRequest, max_items={"tenants": MAX_TENANTS}, answer_bytes=RECORD_BYTES
    ),
    "ListAdapters": RequestBounds(
        pb.ListAdaptersRequest,
        max_items={"tenants": MAX_TENANTS},
        max_chars={"filter": MAX_FILTER_CHARS, "page_token": MAX_TOKEN_CHARS},
        answer_bytes=PAGE_ANSWER_BYTES,
    ),
    "DeleteAdapter": RequestBounds(pb.DeleteAdapterRequest),
    "ListVersions": RequestBounds(
        pb.ListVersionsRequest,
        max_chars={"page_token": MAX_TOKEN_CHARS},
        answer_bytes=PAGE_ANSWER_BYTES,
    ),
    "RollbackAdapter": RequestBounds(pb.RollbackAdapterRequest, answer_bytes=RECORD_BYTES),
    "PruneVersions": RequestBounds(pb.PruneVersionsRequest),
    "PinAdapter": RequestBounds(pb.PinAdapterRequest, answer_bytes=RECORD_BYTES),
    "UnpinAdapter": RequestBounds(pb.UnpinAdapterRequest, answer_bytes=RECORD_BYTES),
    "RegisterLayout": RequestBounds(
        pb.RegisterLayoutRequest,
        MAX_LAYOUT_BYTES,
        max_items={
            "layout.targets": MAX_TARGETS,
            "layout.aliases": MAX_ALIASES,
            "layout.image_formats": MAX_IMAGE_FORMATS,
            "layout.targets.other_names": MAX_ALL_OTHER_NAMES,
            "layout.targets.other_names.block_sizes": MAX_ALL_OTHER_NAMES,
            "layout.targets.base_hashes": MAX_ALL_HASHES,
            "announcement.aliases": MAX_ALIASES,
            "announcement.segment_kinds": MAX_SEGMENT_KINDS,
            "announcement.lora_targets": MAX_LORA_TARGETS,
        },
        max_running=2,  # a large one takes a second of a processor, and 50 MB
    ),
    "PullAdapter": RequestBounds(pb.PullAdapterRequest, answer_bytes=PULL_ANSWER_BYTES),
    "ExportAdapter": RequestBounds(
        pb.ExportAdapterRequest, answer_bytes=PULL_ANSWER_BYTES, max_running=MAX_EXPORTS
    ),
    "GetText": RequestBounds(pb.GetTextRequest, answer_bytes=TEXT_ANSWER_BYTES),
    "WatchAdapters": RequestBounds(pb.WatchAdaptersRequest),
    "ListLayouts": RequestBounds(pb.ListLayoutsRequest, answer_bytes=PAGE_ANSWER_BYTES),
    "ForgetLayout": RequestBounds(pb.ForgetLayoutRequest),
    "GetStoreStatus": RequestBounds(pb.GetStoreStatusRequest),
    "GetDebugInfo": RequestBounds(pb.GetDebugInfoRequest, answer_bytes=DEBUG_BYTES),
}
