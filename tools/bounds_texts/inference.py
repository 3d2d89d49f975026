"""Fields of requests to the inference service, and of the store's answers that it reads."""

from __future__ import annotations

from collections.abc import Sequence

from tools.bounds_texts.line import ACCOUNT, ANSWER, CALLER, NOTHING, QUEUED, SERVER, Line, line

INFERENCE_FIELDS: Sequence[Line] = (
    line(
        "{Generate,Embed,Score,Classify,Tokenize,Detokenize}.adapter "
        "{LoadAdapter,UnloadAdapter,PinAdapter,UnpinAdapter,InspectAdapter}.ref",
        "a name with a version, or a digest; the arena has the adapter that it loads or pins",
        "until the answer; a pin until an operator removes it",
        ACCOUNT,
        "its form; pins have a share of rows and bytes",
        "test_malformed_references_name_the_field test_pins_are_a_place_with_shares",
    ),
    line(
        "{Generate,Embed,Score,Classify}.adapters "
        "{Generate,Embed,Score,Classify}.adapters.{ref,scale}",
        "the adapters of a sum: a row of the table, and each of them in the arena",
        QUEUED,
        ACCOUNT,
        "8 adapters, scales up to 100; a sum that never fits is refused",
        "test_parts_of_a_sum_are_bounded test_sums_that_never_fit_are_refused",
    ),
    line(
        "Generate.{text,token_ids.ids} Tokenize.text Detokenize.token_ids",
        "a prompt, and its tokens",
        "the text until it is tokenised; the tokens as long as the request",
        ACCOUNT,
        "4 MiB a message, `--request-memory`, share; `--max-model-len`",
        "test_too_many_entries_are_refused test_invalid_prompts_name_the_field",
    ),
    line(
        "{Embed,Classify}.inputs "
        "{Embed,Classify}.inputs.{text,token_ids.ids,pair.first,pair.second}",
        "inputs to embed or classify, their tokens, and the results of those that are computed",
        "the texts until they are tokenised; the tokens until the last result is sent",
        ACCOUNT,
        "4 MiB a message, `--request-memory`, share; 2,048 inputs, 300,000 tokens in all, each "
        "within `--max-model-len`; 128 MiB of results for each token; 64 inputs of a call run or "
        "wait in the queue at once",
        "test_bad_input_is_refused_by_name_over_grpc test_one_call_does_not_fill_the_queue "
        "test_results_of_tokens_are_bounded_before_they_are_computed",
    ),
    line(
        "Score.{query,documents,instruction}",
        "documents to score, each in a prompt with the query, and its tokens",
        "the texts until they are tokenised; the tokens until the last score is sent",
        ACCOUNT,
        "4 MiB a message, `--request-memory`, share; 2,048 documents, 300,000 tokens in all, each "
        "prompt within `--max-model-len`; an instruction of 4,096 characters; 64 documents of a "
        "call run or wait in the queue at once",
        "test_bad_input_is_refused_by_name test_one_call_does_not_fill_the_queue",
    ),
    line(
        "Embed.{pooling,normalize,dimensions} Classify.per_token {Score,Classify}.raw "
        "{Embed,Score,Classify}.{truncation,max_tokens}",
        NOTHING,
        QUEUED,
        ACCOUNT,
        "lengths that the model's vectors have; 32 bits of a number of tokens",
        "test_bad_input_is_refused_by_name_over_grpc test_inputs_are_cut_at_either_end "
        "test_dimensions_that_a_model_lacks_are_refused",
    ),
    line(
        "Embed.{request_id,cache_salt,prompt_name} {Score,Classify}.{request_id,cache_salt}",
        "a text, in the log and in the keys of pages; the name of a prompt of the model",
        QUEUED,
        ACCOUNT,
        "256 characters; 64 of a prompt's name",
        "test_bad_input_is_refused_by_name_over_grpc",
    ),
    line(
        "{Generate,Tokenize}.chat.{messages,add_generation_prompt,continue_final_message} "
        "{Generate,Tokenize}.chat.messages.{role,content,reasoning,name,tool_call_id,tool_calls} "
        "{Generate,Tokenize}.chat.messages.tool_calls.{name,arguments,id} "
        "{Generate,Tokenize}.add_special_tokens",
        "a chat, its text, and its tokens",
        "the texts until they are tokenised; the tokens as long as the request",
        ACCOUNT,
        "4 MiB a message, `--request-memory`, share; no more than `--max-model-len` messages",
        "test_chat_of_more_messages_than_the_context_has_tokens_is_refused "
        "test_too_many_entries_are_refused test_messages_out_of_range_name_the_field",
    ),
    line(
        "{Generate,Tokenize}.chat.messages.images "
        "{Generate,Tokenize}.chat.messages.images.{data,sha256,position}",
        "files of images; their pixels as long as the request, embeddings until others need room",
        "the files until they are decoded; the pixels as long as the request",
        ACCOUNT,
        "4 MiB a message, `--request-memory`, share; `--max-prompt-images`; 33,554,432 pixels, 1 "
        "second for the header, 10 seconds and 1 GiB to decode each; `--prompt-image-memory`, "
        "share",
        "test_hostile_files_are_refused test_a_header_that_takes_too_much_work_is_refused "
        "test_a_bomb_ends_its_process_and_the_next_picture_is_decoded "
        "test_bad_pictures_are_refused_by_name "
        "test_the_largest_tenant_loses_what_it_used_longest_ago "
        "test_an_uploaded_file_is_held_until_it_is_decoded",
    ),
    line(
        "UploadImage.chunk UploadImage.upload.{size_bytes,cache_salt} Tokenize.cache_salt",
        "the file of an image",
        "until nobody has used it for an hour, or others need its room",
        ACCOUNT,
        "32 MiB a file, 1 MiB a message, 256 messages and one for each 512 bytes; a quarter of "
        "`--prompt-image-memory`, of which an account has at most its share; 256 characters of a "
        "salt",
        "test_bad_uploads_are_refused_and_hold_nothing "
        "test_an_upload_of_many_small_chunks_is_refused "
        "test_an_account_loses_the_file_that_it_used_longest_ago",
    ),
    line(
        "{Generate,Tokenize}.chat.tools "
        "{Generate,Tokenize}.chat.tools.{name,description,parameters} "
        "{Generate,Tokenize}.chat.{tool_choice,required_tool,single_tool_call} "
        "{Generate,Tokenize}.chat.{separate_reasoning,thinking_token_budget} "
        "{Generate,Tokenize}.chat.{chat_template_kwargs,reasoning_effort}",
        "the tools of an answer, their schemas as texts",
        QUEUED,
        ACCOUNT,
        "4 MiB a message; 128 tools, 262,144 characters of all, 32 levels of a schema; 16 "
        "arguments of 512 characters",
        "test_too_many_entries_are_refused test_tools_out_of_range_name_the_field",
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
        "texts; the service searches each answer for them",
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
        "ids of the vocabulary; at least one token must remain to choose",
        "test_sampling_out_of_range_names_the_field test_too_many_entries_are_refused",
    ),
    line(
        "Generate.sampling.structure.{json_schema,json_object,regex,grammar} "
        "Generate.sampling.structure.choice.texts",
        "the form of an answer: its source, and a compiled grammar in processes of its own",
        "the source as long as the request; compiled, until others are used more recently",
        "the tenant, whose grammars others never share",
        "256 KiB, 4,096 choices; a second of a processor and 512 MiB to check it, in the account's "
        "turn; 16 grammars and 512 KiB of a tenant's are kept compiled, 64 and 1 MiB of all; 10 ms "
        "and 20,000 states for a mask, 1 GiB for all masks, which lie in memory for "
        "--max-sequences of them; one compile for each running row, and tenants compile and "
        "compute in turn",
        "test_hostile_grammars_are_refused test_sources_are_bounded test_templates_are_bounded "
        "test_as_many_choices_as_the_limit_says test_tenants_compile_in_turn "
        "test_an_answer_takes_a_moment test_rows_that_open_take_the_memory_of_ended_ones",
    ),
    line(
        "Generate.{n,sampling.max_tokens}",
        "rows, KV pages and recurrent states while it runs, a place in the queue until then",
        QUEUED,
        ACCOUNT,
        "128 choices; `--max-queue`, `--max-sequences` and pages, in shares of tenants",
        "test_request_fields_out_of_range_name_the_field test_a_tenant_gets_its_part_of_the_places",
    ),
    line(
        "Generate.{echo,sampling.prompt_logprobs,sampling.logprobs,sampling.logprobs_mode,"
        "packed_logprobs}",
        "log probabilities of prompt and answer",
        "until the caller reads them",
        ACCOUNT,
        "1,024 per token, 20 unless they are packed; `--answer-memory`, share; computed in steps",
        "test_scores_of_a_prompt_are_reserved_before_it_runs "
        "test_what_is_not_read_takes_its_accounts_share",
    ),
    line(
        "Generate.return_routed_experts",
        "the experts that each token chose, one or two bytes each",
        "until the caller reads them",
        ACCOUNT,
        "`--answer-memory`, share, reserved before the request runs; refused for models without "
        "experts",
        "test_experts_of_many_tokens_come_in_several_responses "
        "test_what_is_not_read_takes_its_accounts_share",
    ),
    line(
        "Generate.version_policy",
        "the tokens that the service computes again when the request moves to a newer version",
        QUEUED,
        ACCOUNT,
        "a minimum of new tokens between moves; tokens that are computed again count in the "
        "tenant's turn",
        "test_followers_disturb_no_other_tenant "
        "test_versions_that_come_faster_than_they_load_are_followed",
    ),
    line(
        "{Generate,Embed,Score,Classify}.{min_revision,priority} LoadAdapter.min_revision",
        "only a number; a priority orders the requests of its own tenant",
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
        "a range for each",
        "test_sampling_out_of_range_names_the_field test_values_out_of_range_name_the_field",
    ),
    line(
        "LoadAdapter.pin",
        "a row and the bytes of an adapter, which the service does not evict",
        "until each account that pins it has unpinned it",
        "the operator's account; with equal content, for the account of each operator",
        "a share of rows and bytes; room for the largest adapter is always left",
        "test_pins_are_a_place_with_shares",
    ),
    line(
        "PauseGeneration.{mode,resume_after_seconds} Sleep.free_weights",
        "the requests that wait meanwhile",
        "a day at most, if the request sets a time",
        "operators of all tenants",
        "`--max-queue`; deadlines pass",
        "test_a_deadline_passes_while_generation_is_paused",
    ),
    line(
        "ListResidentAdapters.limit ProfileSteps.{num_steps,timeout_seconds,rank}",
        "a list; a trace file",
        "until it is sent; 300 seconds at most",
        "operators",
        "a thousand adapters; 200 steps, one trace at a time",
        "test_trace_size_is_bounded",
    ),
)

HTTP_FIELDS: Sequence[Line] = (
    line(
        "messages messages.{role,content,reasoning_content,reasoning,name,tool_call_id,tool_calls} "
        "messages.tool_calls.id messages.tool_calls.function.{name,arguments} "
        "input input.{type,role,content} instructions prompt token_ids tokens "
        "messages.content.{type,text} system system.{type,text}",
        "prompts, and their tokens",
        "the body until its prompts are tokenised; the tokens as long as the request",
        CALLER,
        "4 MiB a body, whose parts are counted before it is parsed; 16,384 messages, each with 128 "
        "calls of tools, names of 256 and ids of 512 characters; 128 prompts; images as "
        "`Generate.chat.messages.images`, of URLs 16 MiB together in 10 seconds each",
        "test_bodies_of_many_parts_are_refused_before_they_are_parsed "
        "test_chats_have_as_many_messages_as_over_grpc "
        "test_bad_pictures_of_other_apis_are_refused_by_name "
        "test_bad_answers_are_refused_without_their_content",
    ),
    line(
        "tools tools.{type,name,description,parameters} "
        "tools.function.{name,description,parameters} tool_choice "
        "parallel_tool_calls separate_reasoning chat_template_kwargs reasoning_effort "
        "reasoning reasoning.effort thinking_token_budget tools.input_schema "
        "tool_choice.{type,name,disable_parallel_tool_use} thinking thinking.{type,budget_tokens} "
        "output_config output_config.effort",
        "the tools of an answer, their schemas as texts",
        QUEUED,
        CALLER,
        "4 MiB a body, whose parts are counted before it is parsed; 128 tools, 262,144 characters "
        "of all, 32 levels of a schema; 16 arguments of 512 characters",
        "test_bodies_of_many_parts_are_refused_before_they_are_parsed test_errors_name_the_field",
    ),
    line(
        "model adapters adapters.{ref,scale} lora_name base_model",
        "references to adapters",
        QUEUED,
        CALLER,
        "256 characters, 512 on the routes that load adapters; 8 adapters of a sum",
        "test_parts_of_a_sum_are_bounded test_errors_name_the_field",
    ),
    line(
        "lora_path",
        "the address of the adapter's source",
        ANSWER,
        "operators",
        "4,096 characters; then as `RegisterAdapter.source_uri`",
        "test_small_bodies_where_adapters_are_loaded test_load_and_unload",
    ),
    line(
        "stop stop_token_ids stop_sequences",
        "texts and ids that end an answer",
        QUEUED,
        CALLER,
        "16 texts of 256 characters, 256 ids",
        "test_errors_name_the_field",
    ),
    line(
        "response_format response_format.{type,json_schema} response_format.json_schema.schema "
        "text text.format text.format.{type,schema} "
        "structured_outputs structured_outputs.{json,json_object,regex,choice,grammar,"
        "disable_fallback} guided_json guided_regex guided_choice guided_grammar "
        "output_config.format output_config.format.{type,schema}",
        "the form of an answer: its source, and a compiled grammar",
        "as over gRPC",
        CALLER,
        "as over gRPC; the body's parts are counted before it is parsed",
        "test_hostile_grammars_are_refused test_errors_name_the_field",
    ),
    line(
        "response_format.json_schema.{name,description,strict}",
        "nothing; the service discards them",
        "until the body is read",
        CALLER,
        "64 characters; 16,384 characters",
        "test_errors_name_the_field",
    ),
    line(
        "n max_tokens max_completion_tokens max_output_tokens min_tokens ignore_eos best_of",
        "rows, KV pages and recurrent states while it runs, a place in the queue until then",
        QUEUED,
        CALLER,
        "128 choices of all prompts; `--max-queue`, in shares of tenants",
        "test_errors_name_the_field test_a_tenant_gets_its_part_of_the_places",
    ),
    line(
        "logprobs top_logprobs prompt_logprobs logprobs_mode echo return_routed_experts",
        "log probabilities and experts of tokens, as JSON",
        "until the caller reads them",
        CALLER,
        "262,144 log probabilities of an answer; `--answer-memory`, share",
        "test_logprobs_of_a_response_are_bounded test_experts_are_one_text_and_many_events",
    ),
    line(
        "encoding_format dimensions pooling normalize prompt_name use_activation task "
        "truncation_side truncate truncation_direction raw_scores "
        "parameters parameters.{truncate,truncation_direction,prompt_name}",
        "the form of vectors and labels; the name of a prompt of the model",
        QUEUED,
        CALLER,
        "2,048 inputs, 300,000 tokens in all; 128 MiB of results for each token; lengths that the "
        "model's vectors have; 64 characters of a name; `--answer-memory`, share",
        "test_bad_input_is_refused_by_name_over_http "
        "test_results_of_tokens_are_bounded_before_they_are_computed",
    ),
    line(
        "text_1 text_2 query documents instruction top_n return_documents texts return_text "
        "inputs inputs.{source_sentence,sentences}",
        "queries and documents, each pair in a prompt, and its tokens; the documents' texts for "
        "the answer",
        "the body until its prompts are tokenised; the texts until the answer is read",
        CALLER,
        "4 MiB a body, whose parts are counted before it is parsed; 2,048 documents, 300,000 "
        "tokens in all; 4,096 characters of an instruction; `--answer-memory`, share",
        "test_bad_input_is_refused_by_name",
    ),
    line(
        "version_policy min_revision priority",
        "as over gRPC",
        QUEUED,
        CALLER,
        "as over gRPC",
        "test_followers_disturb_no_other_tenant test_tenants_take_turns",
    ),
    line(
        "request_id cache_salt",
        "a text, in the log and in the keys of pages",
        QUEUED,
        CALLER,
        "128 visible characters; 256 characters",
        "test_request_ids_are_the_callers test_errors_name_the_field",
    ),
    line(
        "metadata user safety_identifier prompt_cache_{key,options,retention} service_tier "
        "prediction messages.{id,"
        "annotations,reasoning_details,thinking_blocks,provider_specific_fields,parsed} "
        "messages.tool_calls.{type,index,arguments_error,extra_content,provider_specific_fields} "
        "messages.tool_calls.function.{parsed_arguments,provider_specific_fields} "
        "tools.function.strict tools.strict",
        "nothing; the service discards them",
        "until the body is read",
        CALLER,
        "16 entries; 512 characters each, lists of messages 1,024 entries; else 4 MiB of a body",
        "test_fields_without_effect_are_bounded test_fields_of_messages_without_effect_are_bounded",
    ),
    line(
        "input.{id,phase,status} reasoning.summary text.format.{name,description,strict} "
        "cache_control metadata.user_id messages.content.{cache_control,citations} "
        "system.{cache_control,citations} "
        "tools.{cache_control,eager_input_streaming,input_examples}",
        "nothing; the service discards them",
        "until the body is read",
        CALLER,
        "512 characters for an id; else 4 MiB of a body",
        "test_fields_without_effect_are_bounded test_fields_of_messages_without_effect_are_bounded",
    ),
    line(
        "temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty "
        "stream stream_options stream_options.{include_usage,include_obfuscation} "
        "add_special_tokens add_generation_prompt continue_final_message "
        "return_token_ids return_tokens_as_token_ids return_token_strs pin load_inplace "
        "lora_int_id",
        NOTHING,
        QUEUED,
        CALLER,
        "a range for each",
        "test_errors_name_the_field test_bad_bodies_name_the_field",
    ),
    line(
        "verbosity tools.allowed_callers container mcp_servers "
        "context_management context_management.edits",
        "nothing; the service accepts only values without effect",
        "until the body is read",
        CALLER,
        "empty, null or one fixed value for each; lists of 8 entries",
        "test_fields_without_effect_are_accepted test_fields_without_effect_are_bounded",
    ),
    line(
        "messages.{refusal,audio,function_call} store modalities functions "
        "background conversation include max_tool_calls previous_response_id truncation "
        "reasoning.generate_summary text.verbosity "
        "function_call logit_bias suffix features "
        "kv_transfer_params detokenize speed thinking.display tools.defer_loading "
        "skip_special_tokens spaces_between_special_tokens output_kind "
        "structured_outputs.{disable_any_whitespace,disable_additional_properties,"
        "whitespace_pattern,structural_tag} bad_words allowed_token_ids truncate_prompt_tokens",
        "nothing; the service accepts only values without effect",
        "until the body is read",
        CALLER,
        "empty, null or one fixed value for each",
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
        SERVER,
        "262,144 segments and four times as many dimensions, counted before a large header is "
        "parsed; each segment is complete, aligned, in order and within the image",
        "test_large_headers_are_counted_before_they_are_parsed "
        "test_an_index_that_leads_elsewhere_is_refused",
    ),
    line(
        "PullAdapterResponse.header.{image_id,digest,layout_id,image_format,total_bytes,offset}",
        "an image's size, for which memory is reserved",
        "as long as the adapter is resident",
        SERVER,
        "the arena and the host tier; the image must be the requested one",
        "test_larger_than_the_arena_is_refused",
    ),
    line(
        "PullAdapterResponse.header.{share_ticket,not_shared}",
        "a ticket for the image's file; why there is none",
        "until the pull ends",
        SERVER,
        "32 bytes; of a file its seals and its size; one of twelve reasons",
        "test_files_of_an_impostor_are_not_believed "
        "test_a_lying_header_maps_nothing_that_it_should_not",
    ),
    line(
        "PullAdapterResponse.chunk.{offset,data} PullAdapterResponse.layer_end.{part,end_offset,"
        "sha256} PullAdapterResponse.trailer.sha256 PullAdapterResponse.header.ends "
        "PullAdapterResponse.header.ends.{part,end_offset,sha256} "
        "PullAdapterResponse.header.trailer.sha256",
        "bytes of the image; a hash of each part",
        "until the pull ends; the bytes as long as the adapter is resident",
        SERVER,
        "64 MiB a message; no gap between chunks and no byte after the image's end; as many parts "
        "as segments; in a header 262,144, counted before a large one is parsed",
        "test_broken_streams_are_corrupt test_large_headers_are_counted_before_they_are_parsed",
    ),
    line(
        "GetTextResponse.content",
        "a tokenizer's extract, or a chat template",
        "until others are used more recently",
        "the tenant whose adapter brought it first",
        "2 MiB each; 4,096 texts and 256 MiB; the tenant with the most loses its own first",
        "test_what_is_kept_is_bounded",
    ),
)
