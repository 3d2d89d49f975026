"""Fields of requests to the store, and tables of its catalog."""

from __future__ import annotations

from collections.abc import Sequence

from tools.bounds_texts.line import ACCOUNT, ANSWER, NOTHING, ROW, TENANT, VERSION, Line, line

STORE_FIELDS: Sequence[Line] = (
    line(
        "{RegisterAdapter,DeleteAdapter,ListVersions,RollbackAdapter,PruneVersions}.name "
        "UploadAdapter.meta.name",
        "a tenant and a name, of at most 63 characters each; a registration adds a row to the "
        "catalog",
        "the row for good, so that the store never reuses a version number",
        TENANT,
        "their format; the tenant's `max_adapters`, and 1,000,000 names in all, deleted ones "
        "included",
        "test_malformed_and_long_texts_are_refused_by_field test_names_in_all_are_bounded",
    ),
    line(
        "{GetAdapter,PinAdapter,UnpinAdapter,ExportAdapter}.ref",
        "a name with a version, or a digest",
        ANSWER,
        ACCOUNT,
        "its format, of at most 137 characters",
        "test_malformed_references_name_the_field",
    ),
    line(
        "{RegisterAdapter,UploadAdapter.meta}.{expected_digest,if_current_digest} "
        "RollbackAdapter.if_current_digest PullAdapter.{digest,layout_id} GetText.digest "
        "ForgetLayout.layout_id ListLayouts.page_token WatchAdapters.announcement_id",
        "a hash",
        "until the answer; in a watch as long as the watch",
        ACCOUNT,
        "its format, of 71 characters",
        "test_digests_are_whole test_what_cannot_be_pulled test_invalid_id_of_a_watch "
        "test_forgetting_needs_a_whole_id",
    ),
    line(
        "PullAdapter.image_id",
        "an id; the store compares it with the image's own",
        ANSWER,
        ACCOUNT,
        "the message's 64 KiB",
        "test_another_image_starts_again_at_0",
    ),
    line(
        "PullAdapter.{share_id,wants_ends}",
        "an id; the store compares it with its own, and offers the image's file",
        "until the call ends, or ten minutes after the image",
        ACCOUNT,
        "the message's 64 KiB; 1,024 offered or mapped images, and a quarter of the open files at "
        "most, in shares of tenants",
        "test_one_account_has_its_share_of_files",
    ),
    line(
        "RegisterAdapter.source_uri",
        "the address of the source, recorded with the version",
        VERSION,
        TENANT,
        "2,048 printable characters, and the operator's lists",
        "test_malformed_and_long_texts_are_refused_by_field test_a_source_outside_the_roots",
    ),
    line(
        "RegisterAdapter.{base_model,default_base_model} UploadAdapter.meta.base_model",
        "a name, recorded with the version",
        VERSION,
        TENANT,
        "512 characters",
        "test_malformed_and_long_texts_are_refused_by_field",
    ),
    line(
        "RegisterAdapter.labels UploadAdapter.meta.labels",
        "labels, recorded with the version",
        VERSION,
        TENANT,
        "keys of 63 characters, values of 255",
        "test_malformed_and_long_texts_are_refused_by_field test_too_many_entries_are_refused",
    ),
    line(
        "RegisterAdapter.description UploadAdapter.meta.description",
        "a text, recorded with the version",
        VERSION,
        TENANT,
        "4,096 characters",
        "test_malformed_and_long_texts_are_refused_by_field",
    ),
    line(
        "{RegisterAdapter,UploadAdapter.meta}.signature.{key_id,value}",
        "a signature and the name of its key, recorded with the version",
        VERSION,
        TENANT,
        "64 bytes; a key of the policy",
        "test_what_cannot_be_a_signature_names_its_field test_a_long_key_name_is_cut",
    ),
    line(
        "{RegisterAdapter,UploadAdapter.meta}.pinned",
        "the images of the name's current version, in memory and on disk",
        "until it is unpinned, or the name is deleted",
        "admins",
        "all pinned images must fit into `--image-memory`",
        "test_only_an_admin_registers_pinned test_pinned_images_must_fit_into_memory",
    ),
    line(
        "UploadAdapter.meta.ephemeral",
        "the adapter's files in memory, and not on disk",
        "10 seconds after the version is deleted (`ephemeral-grace-seconds`)",
        TENANT,
        "`--ephemeral-memory`, share; `max_bytes`",
        "test_more_than_the_memory_for_them_is_refused "
        "test_a_tenant_at_its_share_frees_its_own_alone",
    ),
    line(
        "{RegisterAdapter,UploadAdapter.meta}.{keep,ttl_seconds} PruneVersions.keep",
        "only a number; the store deletes versions by it, at once or later",
        "until they are deleted",
        TENANT,
        "the tenant's `max_versions` if it is less; 1,000 versions a call",
        "test_the_smaller_of_what_is_asked_for_and_allowed_is_kept "
        "test_one_transaction_deletes_so_many",
    ),
    line(
        "UploadAdapter.chunk.{file_name,offset}",
        "the name of a file, and the position of its bytes",
        "until the upload is recorded or ends",
        TENANT,
        "128 plain characters, 256 files; no gap or overlap between chunks",
        "test_only_plain_file_names test_the_number_of_files_is_limited "
        "test_a_gap_or_a_repeat_is_refused",
    ),
    line(
        "UploadAdapter.chunk.data",
        "bytes of a file, staged",
        "until they are a blob, or the upload ends",
        TENANT,
        "4 MiB a message; `staging-bytes`, share; `max_bytes`",
        "test_staged_bytes_count_against_the_quota test_staged_bytes_of_all_are_shared",
    ),
    line(
        "{GetAdapter,ListAdapters}.tenants",
        "the tenants on whose behalf a server asks",
        ANSWER,
        ACCOUNT,
        "the format of a tenant's name",
        "test_too_many_entries_are_refused test_a_list_on_behalf_of_tenants_is_theirs_alone",
    ),
    line(
        "ListAdapters.{filter,page_token} ListVersions.page_token",
        "a filter; the position of the next page, with the filter",
        ANSWER,
        ACCOUNT,
        "16 terms; a token belongs to its filter",
        "test_a_filter_has_bounds test_a_long_text_is_refused test_malformed_tokens_name_the_field",
    ),
    line(
        "{ListAdapters,ListVersions}.page_size",
        "a page of records",
        "until it is sent",
        ACCOUNT,
        "1,000 records and 3 MiB",
        "test_page_size_is_within_the_contract test_a_page_ends_before_its_bytes_are_too_many",
    ),
    line(
        "{DeleteAdapter,RollbackAdapter}.version WatchAdapters.since_revision PullAdapter.offset",
        NOTHING,
        ANSWER,
        ACCOUNT,
        "it must exist: a version, a place in the history or in the image",
        "test_versions_and_rollback test_watch_of_another_history "
        "test_resume_at_any_offset_of_the_same_image",
    ),
    line(
        "RegisterLayout.layout.{base_model,config_sha256,dtype,adapter_dtype,"
        "image_formats} "
        "RegisterLayout.layout.targets.{name,layer,group,kind,in_features,out_features,space,held}",
        "the properties of a model and of its targets, recorded with the layout",
        ROW,
        "the account that registered it",
        "names of 512 characters, 2^28 features",
        "test_malformed_layouts_name_the_field test_too_many_entries_are_refused "
        "test_unknown_dtypes_are_named test_unknown_target_kinds_are_named",
    ),
    line(
        "RegisterLayout.layout.targets",
        "the targets of a model",
        ROW,
        "the account that registered it",
        "8 MiB a message; `max-layouts`, `max-layouts-in-all`, share",
        "test_too_many_entries_are_refused test_layouts_of_one_tenant_leave_others_theirs",
    ),
    line(
        "RegisterLayout.layout.targets.experts "
        "RegisterLayout.layout.targets.{in_slice,out_slice,expert_slice}.{start,end} "
        "RegisterLayout.layout.targets.rank_part.{index,count}",
        "the number of a target's experts, and the part of the target that a server holds",
        ROW,
        "the account that registered it",
        "16,384 experts, 1,024 parts; slices within their target",
        "test_hostile_targets_are_refused_by_field test_slices_and_experts",
    ),
    line(
        "RegisterLayout.layout.targets.other_names "
        "RegisterLayout.layout.targets.other_names.{name,outputs.start,outputs.end,block_sizes,"
        "block_part,transposed}",
        "further names of a target, and modules that compute several targets",
        ROW,
        "the account that registered it",
        "16 per target, each with 16 sizes of blocks",
        "test_what_repeats_within_what_repeats_is_counted_of_all_together "
        "test_hostile_targets_are_refused_by_field",
    ),
    line(
        "RegisterLayout.layout.targets.{base_hashes,base_dtype,tied_to}",
        "hashes of the base's own weights",
        ROW,
        "the account that registered it",
        "32 bytes for each 256 rows of the target",
        "test_hostile_targets_are_refused_by_field "
        "test_what_is_said_of_the_base_needs_format_2_as_well",
    ),
    line(
        "RegisterLayout.{layout,announcement}.aliases",
        "other names of the base model",
        "as long as the announcement, and an hour",
        "the servers of the layout",
        "512 printable characters each; 16 announcements per layout, share",
        "test_invalid_announcements test_layout_has_a_bounded_number_of_announcements "
        "test_announcements_of_one_account_leave_places_to_others",
    ),
    line(
        "RegisterLayout.announcement.{num_ranks,rank_index,first_announcement_id}",
        "which of several processes of a server, that compute a model together, a layout is of",
        "as long as the announcement, and an hour",
        "the servers of the layout",
        "1,024 processes; 16 announcements per layout, share",
        "test_invalid_announcements test_layout_has_a_bounded_number_of_announcements",
    ),
    line(
        "RegisterLayout.announcement.{segment_kinds,lora_targets,max_rank,max_added_tokens,"
        "applies_invocation_tokens,weight_form}",
        "the kinds and sizes of adapters that a server accepts, and the form of its weights",
        "as long as the announcement, and an hour",
        "the servers of the layout",
        "names of 128 characters; a form of 64; 16 announcements per layout, share",
        "test_invalid_announcements test_layout_has_a_bounded_number_of_announcements",
    ),
)

TABLES: Sequence[Line] = (
    line(
        "adapters",
        "a row of each name, deleted ones included: some 150 bytes",
        "for good, so that the store never reuses a version number",
        TENANT,
        "`max_adapters`, without deleted ones; 1,000,000 per tenant with them",
        "test_adapters test_names_in_all_are_bounded test_version_numbers_are_never_reused",
    ),
    line(
        "versions",
        "a row of each version, with its labels, description and files, and the names of its own "
        "classifier's labels",
        "until it is deleted, pruned or expired, and the grace",
        TENANT,
        "`max_versions` per name, `max_bytes` for their content; the limits of their fields; 1,024 "
        "names of labels of 16 KiB together, from a file of 1 MiB",
        "test_a_tenant_keeps_so_many_versions test_versions_are_dropped_in_batches "
        "test_names_that_cannot_be_kept_are_a_warning",
    ),
    line(
        "blobs",
        "the names of the modules that an adapter changes, and the kinds of its segments",
        "until its last version is gone, and the grace",
        "tenants that have a version of it",
        "`max_bytes`; 65,536 tensors per adapter",
        "test_collecting_ends_what_no_record_has "
        "test_bytes_count_each_content_once_for_each_tenant",
    ),
    line(
        "texts",
        "extracts of tokenizers, of at most 2 MiB, and chat templates, of at most 1 MiB",
        "until the last version that has them is gone, and the grace",
        TENANT,
        "`max_bytes`, with the weights",
        "test_quotas_count_each_text_once test_texts_go_with_their_last_version",
    ),
    line(
        "images",
        "a verdict for each content and layout, with the list of the adapter's changes",
        "as long as the content and the layout; after a failed build, until the next try",
        "tenants that have a version of it",
        "one for each content and layout",
        "test_a_verdict_for_a_collected_blob_is_dropped test_it_is_a_verdict_and_tried_again_later",
    ),
    line(
        "layouts",
        "a layout's targets, up to 30 MB",
        "four times `--layout-ttl-seconds` after its last use",
        "the account that registered it",
        "`max-layouts` per base model, `max-layouts-in-all`, share",
        "test_layouts_of_one_tenant_leave_others_theirs "
        "test_layouts_that_nobody_uses_are_forgotten",
    ),
    line(
        "layout_bases",
        "the names of a layout's base models",
        "as long as the layout, an alias as long as its announcement",
        "the servers of the layout",
        "the layout's own, and 64 aliases of each announcement",
        "test_alias_stays_while_a_server_has_it",
    ),
    line(
        "announcements",
        "the facts that servers announce with a layout",
        "an hour after the last watch with its id",
        "the servers of the layout",
        "16 per layout, share",
        "test_layout_has_a_bounded_number_of_announcements "
        "test_announcement_lasts_an_hour_after_its_renewals",
    ),
    line(
        "events",
        "a row for each change of a name",
        "until newer changes replace it",
        "everybody who may watch the tenant",
        "`event-retention`",
        "test_dropped_events_are_an_error",
    ),
    line(
        "leases",
        "the owner of each task that only one replica may do at a time",
        "until the task is done, or the lease expires",
        "the replicas",
        "one for each running build, and for each of the store's own tasks",
        "test_leases_of_owners_long_dead_leave_no_rows",
    ),
    line(
        "history meta",
        "the revision, and a few facts of the catalog",
        "for good",
        "the store",
        "one row, and one for each fact",
        "test_the_revision_survives_forgetting_everything_else",
    ),
)
