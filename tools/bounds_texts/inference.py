"""Fields of requests to the inference service, and what it reads of a store's answers."""

from __future__ import annotations

from collections.abc import Sequence

from tools.bounds_texts.line import ACCOUNT, ANSWER, NOTHING, QUEUED, Line, line

INFERENCE_FIELDS: Sequence[Line] = (
    line(
        "Generate.adapter {LoadAdapter,UnloadAdapter,PinAdapter,UnpinAdapter,InspectAdapter}.ref",
        "a name with a version, or a digest; what is loaded or pinned is in the arena",
        "until the answer; a pin until it is removed",
        "the account",
        "its form; pins have a share of rows and bytes",
        "test_malformed_references_name_the_field test_pins_are_a_place_with_shares",
    ),
    line(
        "Generate.adapters Generate.adapters.{ref,scale}",
        "the adapters of a sum: a row of the table, and each of them in the arena",
        QUEUED,
        ACCOUNT,
        "8 adapters, scales up to 100; a sum that never fits is refused",
        "test_parts_of_a_sum_are_bounded test_sums_that_never_fit_are_refused",
    ),
    line(
        "Generate.{text,token_ids.ids}",
        "a prompt, and its tokens",
        "a text until it is tokens; these as long as the request",
        ACCOUNT,
        "4 MiB a message, `--request-memory`, share; `--max-model-len`",
        "test_too_many_entries_are_refused test_invalid_prompts_name_the_field",
    ),
    line(
        "Generate.chat.messages Generate.chat.messages.{role,content}",
        "a chat, its text, and its tokens",
        "until they are tokens; these as long as the request",
        ACCOUNT,
        "4 MiB a message, `--request-memory`, share; no more than `--max-model-len` messages",
        "test_chat_of_more_messages_than_the_context_has_tokens_is_refused "
        "test_too_many_entries_are_refused",
    ),
    line(
        "Generate.{request_id,cache_salt}",
        "a text, in the log and in the keys of pages",
        QUEUED,
        ACCOUNT,
        "256 characters",
        "test_request_fields_out_of_range_name_the_field",
    ),
    line(
        "Generate.sampling.stop",
        "texts that are looked for in each answer",
        QUEUED,
        ACCOUNT,
        "256 characters each",
        "test_sampling_out_of_range_names_the_field test_too_many_entries_are_refused",
    ),
    line(
        "Generate.sampling.stop_token_ids",
        "ids that end an answer",
        QUEUED,
        ACCOUNT,
        "ids of the vocabulary; some token must be left to choose",
        "test_sampling_out_of_range_names_the_field test_too_many_entries_are_refused",
    ),
    line(
        "Generate.{n,sampling.max_tokens}",
        "rows and KV pages while it runs, a place in the queue until then",
        QUEUED,
        ACCOUNT,
        "128 choices; `--max-queue`, `--max-sequences` and pages, in shares of tenants",
        "test_request_fields_out_of_range_name_the_field test_a_tenant_gets_its_part_of_the_places",
    ),
    line(
        "Generate.{echo,sampling.prompt_logprobs,sampling.logprobs,sampling.logprobs_mode,"
        "packed_logprobs}",
        "log probabilities of prompt and answer, until they are sent",
        "until its reader takes them",
        ACCOUNT,
        "1,024 of a token, 20 unless they are packed; `--answer-memory`, share; work in steps",
        "test_scores_of_a_prompt_are_reserved_before_it_runs "
        "test_what_is_not_read_takes_its_accounts_share",
    ),
    line(
        "Generate.return_routed_experts",
        "the experts that each token chose, one or two bytes each",
        "until its reader takes them",
        ACCOUNT,
        "`--answer-memory`, share, reserved before the request runs; refused without experts",
        "test_experts_of_many_tokens_come_in_several_responses "
        "test_what_is_not_read_takes_its_accounts_share",
    ),
    line(
        "Generate.version_policy",
        "the tokens that are computed again at a move",
        QUEUED,
        ACCOUNT,
        "a move per so many new tokens; what is computed again counts in the tenant's turn",
        "test_followers_disturb_no_other_tenant "
        "test_versions_that_come_faster_than_they_load_are_followed",
    ),
    line(
        "Generate.{min_revision,priority} LoadAdapter.min_revision",
        "nothing; a priority orders the requests of its own tenant",
        "until the revision is there, or the call's deadline",
        ACCOUNT,
        "31 bits; other tenants have their turns",
        "test_tenants_take_turns",
    ),
    line(
        "Generate.sampling.{temperature,top_k,top_p,min_p,seed,min_tokens,ignore_eos,"
        "presence_penalty,frequency_penalty,repetition_penalty}",
        NOTHING,
        QUEUED,
        ACCOUNT,
        "a range each",
        "test_sampling_out_of_range_names_the_field test_values_out_of_range_name_the_field",
    ),
    line(
        "LoadAdapter.pin",
        "a row and the bytes of an adapter, which nobody evicts",
        "until each account that pins it has unpinned it",
        "the operator's account, each of equal content",
        "a share of rows and bytes; room for the largest adapter is always left",
        "test_pins_are_a_place_with_shares",
    ),
    line(
        "PauseGeneration.{mode,resume_after_seconds} Sleep.free_weights",
        "the requests that wait meanwhile",
        "a day at most, where a time is given",
        "operators of all tenants",
        "`--max-queue`; deadlines pass",
        "test_a_deadline_passes_while_generation_is_paused",
    ),
    line(
        "ListResidentAdapters.limit ProfileSteps.{num_steps,timeout_seconds}",
        "a list; a trace file",
        "until it is sent; 300 seconds at most",
        "operators",
        "a thousand adapters; 200 steps, one trace at a time",
        "test_trace_size_is_bounded",
    ),
)

HTTP_FIELDS: Sequence[Line] = (
    line(
        "messages messages.{role,content} prompt token_ids",
        "prompts, and their tokens",
        "the body until its prompts are tokens; these as long as the request",
        "the caller",
        "4 MiB a body, counted in parts before it is parsed; 16,384 messages, 128 prompts",
        "test_bodies_of_many_parts_are_refused_before_they_are_parsed "
        "test_chats_have_as_many_messages_as_over_grpc",
    ),
    line(
        "model adapters adapters.{ref,scale} lora_name base_model",
        "references to adapters",
        QUEUED,
        "the caller",
        "256 characters, where adapters are loaded 512; 8 adapters of a sum",
        "test_parts_of_a_sum_are_bounded test_errors_name_the_field",
    ),
    line(
        "lora_path",
        "where the store fetches the adapter from",
        ANSWER,
        "operators",
        "4,096 characters; then as `RegisterAdapter.source_uri`",
        "test_small_bodies_where_adapters_are_loaded test_load_and_unload",
    ),
    line(
        "stop stop_token_ids",
        "what ends an answer",
        QUEUED,
        "the caller",
        "16 texts of 256 characters, 256 ids",
        "test_errors_name_the_field",
    ),
    line(
        "n max_tokens max_completion_tokens min_tokens ignore_eos best_of",
        "rows and KV pages while it runs, a place in the queue until then",
        QUEUED,
        "the caller",
        "128 choices of all prompts; `--max-queue`, in shares of tenants",
        "test_errors_name_the_field test_a_tenant_gets_its_part_of_the_places",
    ),
    line(
        "logprobs top_logprobs prompt_logprobs logprobs_mode echo return_routed_experts",
        "what is said of tokens, as JSON",
        "until it is read",
        "the caller",
        "262,144 log probabilities of an answer; `--answer-memory`, share",
        "test_logprobs_of_a_response_are_bounded test_experts_are_one_text_and_many_events",
    ),
    line(
        "version_policy min_revision priority",
        "as over gRPC",
        QUEUED,
        "the caller",
        "as over gRPC",
        "test_followers_disturb_no_other_tenant test_tenants_take_turns",
    ),
    line(
        "request_id cache_salt",
        "a text, in the log and in the keys of pages",
        QUEUED,
        "the caller",
        "128 visible characters; 256 characters",
        "test_request_ids_are_the_callers test_errors_name_the_field",
    ),
    line(
        "metadata user safety_identifier prompt_cache_key service_tier messages.name",
        "nothing: they are read and dropped",
        "until the body is read",
        "the caller",
        "16 entries; 512 characters each, a message's name 256",
        "test_fields_without_effect_are_bounded",
    ),
    line(
        "temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty "
        "stream stream_options stream_options.{include_usage,include_obfuscation} "
        "return_token_ids return_tokens_as_token_ids pin load_inplace lora_int_id",
        NOTHING,
        QUEUED,
        "the caller",
        "a range each",
        "test_errors_name_the_field test_bad_bodies_name_the_field",
    ),
    line(
        "messages.{refusal,annotations,audio,function_call,tool_calls} store response_format "
        "response_format.type modalities tools functions tool_choice function_call "
        "parallel_tool_calls logit_bias suffix features kv_transfer_params detokenize "
        "skip_special_tokens spaces_between_special_tokens output_kind structured_outputs "
        "bad_words allowed_token_ids truncate_prompt_tokens",
        "nothing: only values that change nothing are accepted",
        "until the body is read",
        "the caller",
        "empty, null or one value each",
        "test_fields_without_effect_are_accepted test_fields_without_effect_are_bounded",
    ),
)

PULLED_FIELDS: Sequence[Line] = (
    line(
        "PullAdapterResponse.header.segments "
        "PullAdapterResponse.header.segments.{target,kind,rank,offset,length_bytes,"
        "dtype,shape,scale}",
        "the parts of an image",
        "as long as the adapter is resident",
        "the server",
        "262,144 segments and four times as many dimensions, counted before a large header is "
        "parsed; each complete, aligned, in order and within the image",
        "test_large_headers_are_counted_before_they_are_parsed "
        "test_an_index_that_leads_elsewhere_is_refused",
    ),
    line(
        "PullAdapterResponse.header.{image_id,digest,layout_id,image_format,total_bytes,offset}",
        "an image's size, for which memory is reserved",
        "as long as the adapter is resident",
        "the server",
        "the arena and the host tier; it is the image that was asked for",
        "test_larger_than_the_arena_is_refused",
    ),
    line(
        "PullAdapterResponse.chunk.{offset,data} PullAdapterResponse.layer_end.{part,end_offset,"
        "sha256} PullAdapterResponse.trailer.sha256",
        "bytes of the image; a hash of each part",
        "until the pull ends; the bytes as long as the adapter is resident",
        "the server",
        "64 MiB a message; bytes follow one another and end with the image; as many parts as "
        "segments",
        "test_broken_streams_are_corrupt",
    ),
    line(
        "GetTextResponse.content",
        "a tokenizer's extract, or a chat template",
        "until others were used",
        "the tenant whose adapter brought it first",
        "2 MiB; 4,096 of them and 256 MiB, of the tenant with most go first",
        "test_what_is_kept_is_bounded",
    ),
)
