"""Defines every metric of the inference service; docs/observability/metrics.md is made from it."""

from __future__ import annotations

from servicekit.telemetry.histogram import QUEUE_BOUNDS_S, REQUEST_BOUNDS_S
from servicekit.telemetry.metrics import PROCESS, Definitions, Namespace, define_reloads
from servicekit.telemetry.place_metrics import define_places

PREFIX = "loadout_inference_"
_OWN = Namespace(PREFIX)
_GATEWAY = Namespace()
RECURRENT = "Only for models with recurrent layers."

REQUESTS = (
    _OWN.counter("rpcs", "gRPC calls by method and status code.", "method", "code"),
    _OWN.counter(
        "http_requests",
        "HTTP requests by route and status; 499: the client disconnected first.",
        "route",
        "status",
    ),
    _OWN.counter(
        "rejections",
        "Calls that were refused or failed, by the error's reason; over HTTP the method is the "
        "route.",
        "method",
        "reason",
    ),
    _OWN.counter(
        "requests",
        "Generations that ended: stop, length, aborted (deadline), cancelled (the client "
        "disconnected), error.",
        "finish_reason",
    ),
    _OWN.counter(
        "pooled_requests",
        "Inputs that were pooled instead of generated from, such as the inputs of embeddings, by "
        "kind and by how they ended. A call counts once for each of its inputs.",
        "kind",
        "finish_reason",
    ),
    _OWN.histogram(
        "pooled_request_seconds",
        "Time from the arrival of an input that is pooled until its vector was there.",
        bounds_s=REQUEST_BOUNDS_S,
    ),
    _OWN.counter(
        "tool_calls",
        "Calls of tools in answers, counted when their request ends. invalid: the arguments are no "
        "JSON object.",
        "arguments",
    ),
    _OWN.counter("prompt_tokens", "Prompt tokens, counted when their request finishes."),
    _OWN.counter("cached_prompt_tokens", "Prompt tokens found in the prefix cache."),
    _OWN.counter("generated_tokens", "Tokens sent to clients, counted when their request ends."),
    _OWN.counter("sampled_tokens", "Tokens, counted when the engine samples them."),
    _OWN.histogram(
        "queue_seconds",
        "Time from a request's arrival until it first ran. If its client disconnected before the "
        "first token: until then.",
        bounds_s=QUEUE_BOUNDS_S,
    ),
    _OWN.histogram(
        "adapter_wait_seconds",
        "Time from a request's arrival until its adapter was resident, or until the request gave "
        "up waiting for it.",
        bounds_s=QUEUE_BOUNDS_S,
    ),
    _OWN.histogram(
        "first_token_seconds",
        "Time from a request's arrival to its first token. If its client disconnected or its "
        "deadline passed without one: until then, a lower bound.",
        bounds_s=QUEUE_BOUNDS_S,
    ),
    _OWN.histogram(
        "inter_token_seconds", "Time between two tokens of a request, as the engine samples them."
    ),
    _OWN.histogram(
        "request_seconds",
        "Time from a request's arrival to its last token.",
        bounds_s=REQUEST_BOUNDS_S,
    ),
    _OWN.gauge(
        "snapshot_age_seconds",
        "Age of the engine's last report: about 0, and growing while the engine does "
        "not answer. All metrics from the engine are as old, including the metrics "
        "for gateways.",
    ),
    _OWN.gauge("requests_running", "Requests in the batch."),
    _OWN.gauge("requests_waiting", "Requests in the queue."),
    _OWN.gauge(
        "requests_waiting_for_adapter", "Requests in the queue whose adapter is not resident."
    ),
    _OWN.counter(
        "preemptions",
        "Requests returned to the queue because the KV cache ran out of pages, or the server went "
        "to sleep.",
    ),
    _OWN.counter("prompt_image_encodes", "Images of prompts whose embeddings were computed."),
    _OWN.counter("prompt_image_hits", "Images of prompts whose embeddings were there already."),
    _OWN.counter(
        "prompt_image_evictions",
        "Images of prompts whose embeddings were dropped to make room, or before they were "
        "complete because their requests had ended.",
    ),
    _OWN.gauge(
        "prompt_image_embedding_used_bytes",
        "Bytes of embeddings that running requests hold. Without room for its next image, a "
        "request waits.",
    ),
    _OWN.gauge(
        "prompt_image_embedding_stored_bytes", "Bytes of all embeddings of images, held or not."
    ),
    _OWN.gauge(
        "prompt_image_embedding_capacity_bytes",
        "Bytes that embeddings may take: half of --prompt-image-memory, or 0 for text alone.",
    ),
    _OWN.counter(
        "prompt_image_fetches",
        "Images of URLs, by the outcome of their fetch: done, or why there is none.",
        "outcome",
    ),
    _OWN.counter("version_moves", "Moves of requests to a newer version of their adapter."),
    _OWN.gauge("generation_paused", "1 while generation is paused."),
    _OWN.gauge("asleep", "1 while the server's memory is freed, and until it is awake again."),
)

STRUCTURE = (
    _OWN.counter(
        "structured_requests",
        "Requests for a form of the answer, by the verdict on it: accepted or refused.",
        "result",
    ),
    _OWN.counter("grammar_check_hits", "Forms whose verdict was known."),
    _OWN.counter("grammar_check_seconds", "Time of checks of forms, in processes of their own."),
    _OWN.counter("grammar_opens", "Sequences that began, or began again, to follow a form."),
    _OWN.counter("grammar_cache_hits", "Sequences whose form was compiled already."),
    _OWN.counter("grammar_compile_seconds", "Processor time of compiling forms for sequences."),
    _OWN.counter("grammar_masks", "Masks: one for each token of a structured answer."),
    _OWN.counter("grammar_mask_seconds", "Processor time of masks."),
    _OWN.counter(
        "grammar_late_masks",
        "Rows of steps that were left out, because their mask was not there in time.",
    ),
    _OWN.counter(
        "grammar_process_restarts",
        "Processes of masks that ended, because a form took too much time or memory, or this "
        "machine had none.",
    ),
    _OWN.gauge("grammar_rows", "Running sequences that follow a form."),
    _OWN.gauge("grammar_slow_rows", "Of these, the ones whose masks are slow."),
)

_BY_ADAPTER = (
    "By adapter, as tenant/name: the busiest have a series each (see `--metrics-adapters`); base "
    "is the base model, other all adapters without a series, former the counts of adapters that "
    "lost theirs."
)

ADAPTERS = (
    _OWN.counter("adapter_requests", f"Generations that ended. {_BY_ADAPTER}", "adapter"),
    _OWN.counter("adapter_errors", "Generations that ended with an error.", "adapter"),
    _OWN.counter("adapter_prompt_tokens", "Prompt tokens.", "adapter"),
    _OWN.counter("adapter_generated_tokens", "Tokens sent to clients.", "adapter"),
    _OWN.summary("adapter_first_token_seconds", "Time from arrival to first token.", "adapter"),
    _OWN.summary(
        "adapter_load_wait_seconds",
        "Time from arrival until the adapter was resident.",
        "adapter",
    ),
)

TIERS = (
    _OWN.counter("tier_hits", "Requests that found their adapter in this tier.", "tier"),
    _OWN.counter("tier_misses", "Requests that did not find their adapter in this tier.", "tier"),
    _OWN.counter(
        "tier_evictions",
        "Adapters evicted, by reason: request (a request needs another adapter), aged"
        " (a request has waited too long for another adapter), prefetch, or unload "
        "(an operator's call).",
        "tier",
        "reason",
    ),
    _OWN.histogram(
        "tier_evicted_idle_seconds",
        "Time since evicted adapters were last used. Short times indicate thrashing.",
        "tier",
    ),
    _OWN.gauge("tier_used_bytes", "Bytes used by adapters; tier device is the arena.", "tier"),
    _OWN.gauge("tier_capacity_bytes", "Bytes available for adapters.", "tier"),
    _OWN.gauge("tier_pinned_bytes", "Bytes of pinned adapters, which are never evicted.", "tier"),
    _OWN.gauge(
        "tier_largest_free_bytes",
        "Size of the largest free range. Fragmentation is 1 - this / (capacity - used).",
        "tier",
    ),
    _OWN.gauge("tier_free_ranges", "Number of free ranges.", "tier"),
    _OWN.gauge("tier_images", "Number of adapters with memory reserved.", "tier"),
    _OWN.gauge(
        "residency_series",
        "Number of series of vllm:lora_adapter_loaded in this scrape, by level (gpu, cpu).",
        "level",
    ),
)

LOADS = (
    _OWN.gauge(
        "text_cache_entries", "Tokenizers and chat templates of adapters that are ready to use."
    ),
    _OWN.gauge(
        "text_cache_used_bytes", "Approximate bytes of tokenizers and chat templates of adapters."
    ),
    _OWN.counter(
        "text_loads",
        "Tokenizers and chat templates of adapters fetched from the store: made, "
        "refused (the tokenizer makes changes that are not allowed), failed (the "
        "store did not answer).",
        "result",
    ),
    _OWN.histogram(
        "load_seconds",
        "Time from the first request for an adapter until requests could run with it, by source of "
        "its bytes: host (the host tier) or store (a cold load).",
        "source",
    ),
    _OWN.histogram(
        "load_phase_seconds",
        "Time of each phase of loads: resolve (look up the name in the store), wait "
        "(for a pull thread and for memory), pull (from the store), copy (from the "
        "host tier to the device).",
        "phase",
    ),
    _OWN.gauge("loads_in_progress", "Adapters being loaded, by their next phase.", "state"),
    _OWN.counter("pulls", "Adapters pulled completely and verified."),
    _OWN.counter("pull_failures", "Adapters that could not be pulled."),
    _OWN.counter(
        "corrupt_pulls", "Image streams whose bytes failed their hash; each is retried once."
    ),
    _OWN.counter("pulled_bytes", "Bytes of adapters pulled."),
    _OWN.counter("prefetch_images", "Adapters loaded before any request needed them."),
    _OWN.counter("prefetch_bytes", "Bytes of prefetched adapters."),
    _OWN.counter("prefetch_hits", "Prefetched adapters that a request then used."),
    _OWN.counter("prefetch_wasted_bytes", "Bytes of prefetched adapters that were evicted unused."),
    _OWN.gauge(
        "store_connected", "1 while the watch on the store is live; absent while the server drains."
    ),
    _OWN.gauge(
        "store_replicas_healthy",
        "Replicas of the store: 1 if in use, 0 while avoided as unhealthy.",
        "replica",
    ),
    _OWN.counter(
        "store_pulls", "Image streams from a replica that ended, by result.", "replica", "result"
    ),
    _OWN.counter(
        "store_shared_pulls",
        "Pulls of a server with --store-share-socket, by how their bytes came: shared, as a file "
        "that is mapped; else they were streamed, because the socket was unreachable, refused the "
        "ticket, or its file was unsealed or had the wrong_size, or for a reason of the store's.",
        "result",
    ),
    _OWN.counter(
        "registered_images",
        "Images mapped from the store's memory by a server on a GPU, by what became of them: "
        "registered, so that the GPU copies them from there; else they were copied through the "
        "host tier, because they are small, others have all places (too_many), they take more "
        "than all may (too_large), or the GPU has refused one in the last minute (failed).",
        "result",
    ),
    _OWN.gauge(
        "registered_bytes",
        "Bytes of images that are registered with a GPU where the store has them.",
    ),
    _OWN.counter("store_pulled_bytes", "Bytes of images pulled from a replica.", "replica"),
    _OWN.counter("store_failovers", "Pulls and lookups that continued at another replica."),
)

STEPS = (
    _OWN.histogram(
        "step_seconds", "Time of steps, from reading their messages to sending their outputs."
    ),
    _OWN.histogram("step_host_seconds", "Part of a step outside the model's computation."),
    _OWN.histogram("step_blocked_by_load_seconds", "Part of a step spent on loading adapters."),
    _OWN.histogram(
        "step_phase_seconds",
        "Time of each phase of a step: schedule, prepare, forward, sample, settle. On a GPU "
        "forward launches kernels, and sample waits for them.",
        "phase",
    ),
    _OWN.counter("lora_steps", "Steps whose batch used an adapter."),
    _OWN.counter(
        "eager_steps",
        "Steps that a GPU computed kernel by kernel: scored steps, and steps without a recording.",
    ),
    _OWN.counter(
        "step_out_of_memory",
        "Steps that ran out of the device's memory and were computed in parts.",
    ),
    _OWN.counter(
        "not_finite_requests",
        "Requests that ended because the model's values were not finite, and loads of adapters "
        "whose DoRA magnitudes are not: an adapter's weights are too large. `loadout residents` "
        "and `loadout top` name the adapters.",
    ),
    _OWN.counter(
        "faulty_requests",
        "Requests that ended because computing them failed, alone and with others: a "
        "bug, which the log shows.",
    ),
    _OWN.counter(
        "device_faults",
        "Faults of the device or its driver that ended the engine or its start: "
        "memory (other programs use it), hardware, lost, driver, kernel, hung, busy. "
        "The server answers scrapes for --fault-hold-seconds, then exits.",
        "kind",
    ),
    _OWN.gauge(
        "step_token_limit",
        "Maximum tokens computed at once: fewer than --max-batch-tokens after a step ran out of "
        "the device's memory.",
    ),
    _OWN.gauge("kv_pages_used", "KV cache pages that requests hold."),
    _OWN.gauge("kv_pages_known", "KV cache pages, held or free, whose content a prefix can match."),
    _OWN.gauge("kv_pages_capacity", "Number of KV cache pages."),
    _OWN.counter(
        "kv_page_evictions", "KV cache pages whose cached content was replaced by other content."
    ),
    _OWN.gauge(
        "recurrent_states_used",
        f"Recurrent states that requests hold: at least two for each running request. {RECURRENT}",
    ),
    _OWN.gauge(
        "recurrent_states_stored",
        f"Recurrent states, held or free, that a prefix can match. {RECURRENT}",
    ),
    _OWN.gauge("recurrent_states_capacity", f"Number of recurrent states. {RECURRENT}"),
    _OWN.counter(
        "recurrent_state_evictions",
        f"Stored recurrent states that were replaced by other states. {RECURRENT}",
    ),
    _OWN.counter(
        "recurrent_recomputed_tokens",
        "Tokens that were computed although their pages were known, because no recurrent state was "
        "stored at their end. Many: raise --stored-states, or lower --state-interval-tokens. "
        f"{RECURRENT}",
    ),
    _OWN.gauge("memory_used_bytes", "Memory in use, by area.", "area"),
    _OWN.gauge("memory_capacity_bytes", "Memory available, by area.", "area"),
)

_RANK = ("rank", "stage")
RANKS = (
    _OWN.gauge(
        "rank_up",
        "Processes that compute the model together (--tensor-parallel, --pipeline-parallel), by "
        "index and stage: 1 while the process answers. After 30 seconds of silence the server "
        "ends.",
        *_RANK,
    ),
    _OWN.gauge("rank_resident_bytes", "Resident memory of the process.", *_RANK),
    _OWN.counter("rank_steps", "Steps that the process has computed.", *_RANK),
    _OWN.counter("rank_step_seconds", "Time of these steps.", *_RANK),
    _OWN.counter(
        "rank_exchange_seconds",
        "Time of these steps in exchanges with the other processes, mostly of waiting for them.",
        *_RANK,
    ),
    _OWN.counter("rank_pulled_bytes", "Bytes of adapters that the process has pulled.", *_RANK),
)

ABOUT = (
    _OWN.gauge(
        "info", "Always 1; the labels describe the served model.", "base_model", "dtype", "device"
    ),
    _OWN.gauge(
        "build_info",
        "Always 1; the labels are the software's versions.",
        "version",
        "python",
        "torch",
    ),
    _OWN.gauge(
        "weight_format_info",
        "Always 1, for each format of weights in few bits; `kernels` names the code that "
        "multiplies by it: native; a GPU's kernel; or dequantised, which is slow.",
        "format",
        "kernels",
    ),
    define_reloads(_OWN),
    *PROCESS,
)

GATEWAYS = (
    _GATEWAY.gauge("vllm:num_requests_running", "Requests in the batch."),
    _GATEWAY.gauge("vllm:num_requests_waiting", "Requests in the queue."),
    _GATEWAY.gauge("vllm:kv_cache_usage_perc", "Fraction of KV cache pages in use, 0 to 1."),
    _GATEWAY.gauge(
        "vllm:lora_requests_info",
        "Adapters with requests, separated by commas; the value is the unix time of the engine's "
        "report.",
        "max_lora",
        "running_lora_adapters",
        "waiting_lora_adapters",
    ),
    _GATEWAY.gauge(
        "vllm:lora_adapter_loaded",
        "1 for each name of each resident adapter, as clients write it: all adapters "
        "on the device (gpu) and the most recently used ones in host memory (cpu).",
        "adapter_name",
        "level",
        "pinned",
        "rank",
    ),
    _GATEWAY.gauge("vllm:num_gpu_loaded_lora_adapters", "Adapters on the device."),
    _GATEWAY.gauge("vllm:max_gpu_lora_adapters", "Maximum number of adapters on the device."),
    _GATEWAY.summary(
        "vllm:lora_adapter_load_seconds",
        "Time from the first request for an adapter until it was resident.",
    ),
)

SECTIONS = {
    "Requests": REQUESTS,
    "Requests by adapter": ADAPTERS,
    "Adapters in memory": TIERS,
    "Loads and the store": LOADS,
    "Steps and pages": STEPS,
    "Structured answers": STRUCTURE,
    "Several processes for one model": RANKS,
    "Places that tenants share": define_places(_OWN),
    "Process": ABOUT,
    "For gateways": GATEWAYS,
}

DEFINITIONS = Definitions(PREFIX, SECTIONS)
