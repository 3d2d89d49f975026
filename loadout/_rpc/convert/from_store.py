"""The adapter store's messages as the client's types."""

from __future__ import annotations

from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp

from contract.protobuf import SEGMENT_KINDS
from loadout import types
from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb

IMAGE_STATES = {
    store_pb.IMAGE_STATE_PENDING: types.ImageState.PENDING,
    store_pb.IMAGE_STATE_COMPILING: types.ImageState.COMPILING,
    store_pb.IMAGE_STATE_READY: types.ImageState.READY,
    store_pb.IMAGE_STATE_INCOMPATIBLE: types.ImageState.INCOMPATIBLE,
}
BASE_MODEL_SOURCES = {
    store_pb.BASE_MODEL_SOURCE_CALLER: types.BaseModelSource.CALLER,
    store_pb.BASE_MODEL_SOURCE_CURRENT_VERSION: types.BaseModelSource.CURRENT_VERSION,
    store_pb.BASE_MODEL_SOURCE_SERVED: types.BaseModelSource.SERVED,
    store_pb.BASE_MODEL_SOURCE_CONFIG: types.BaseModelSource.CONFIG,
    store_pb.BASE_MODEL_SOURCE_DEFAULT: types.BaseModelSource.DEFAULT,
    store_pb.BASE_MODEL_SOURCE_ONLY_SERVED: types.BaseModelSource.ONLY_SERVED,
}
EVENT_KINDS = {
    store_pb.EVENT_KIND_REGISTERED: types.EventKind.REGISTERED,
    store_pb.EVENT_KIND_UPDATED: types.EventKind.UPDATED,
    store_pb.EVENT_KIND_DELETED: types.EventKind.DELETED,
    store_pb.EVENT_KIND_PINNED: types.EventKind.PINNED,
    store_pb.EVENT_KIND_UNPINNED: types.EventKind.UNPINNED,
    store_pb.EVENT_KIND_BOOKMARK: types.EventKind.BOOKMARK,
}


def time_of(stamp: Timestamp) -> datetime | None:
    return stamp.ToDatetime(tzinfo=UTC) if stamp.seconds or stamp.nanos else None


def adapter(message: store_pb.Adapter) -> types.Adapter:
    return types.Adapter(
        name=message.name,
        version=message.version,
        digest=message.digest,
        source_uri=message.source_uri,
        base_model=message.base_model,
        rank=message.rank,
        targets=tuple(message.targets),
        source_bytes=message.source_bytes,
        labels=dict(message.labels),
        create_time=time_of(message.create_time),
        update_time=time_of(message.update_time),
        pinned=message.pinned,
        layout_states=tuple(_layout_state(state) for state in message.layout_states),
        description=message.description,
        created_by=message.created_by,
        source_revision=message.source_revision,
        config_base_model=message.config_base_model,
        files=tuple(
            types.SourceFile(file.name, file.size_bytes, file.sha256) for file in message.files
        ),
        signed_by=message.signed_by,
        delete_time=time_of(message.delete_time),
        segment_kinds=tuple(
            SEGMENT_KINDS.get(kind, types.SegmentKind.UNKNOWN) for kind in message.segment_kinds
        ),
        added_tokens=message.added_tokens,
        invocation_tokens=tuple(message.invocation_tokens),
        tokenizer_digest=message.tokenizer_digest,
        chat_template_digest=message.chat_template_digest,
        class_labels=tuple(message.class_labels),
        ephemeral=message.ephemeral,
        expire_time=time_of(message.expire_time),
    )


def _layout_state(message: store_pb.LayoutState) -> types.LayoutState:
    return types.LayoutState(
        layout_id=message.layout_id,
        state=IMAGE_STATES.get(message.state, types.ImageState.UNKNOWN),
        reason=message.reason,
        image_bytes=message.image_bytes,
        servers=tuple(
            types.ServerVerdict(
                each.announcement_id,
                each.max_rank,
                each.servable,
                each.reason,
                each.note,
                each.num_ranks,
                each.rank_index,
                each.first_announcement_id,
            )
            for each in message.servers
        ),
        fits=message.fits,
        unused_spaces=tuple(message.unused_spaces),
    )


def layout_page(message: store_pb.ListLayoutsResponse) -> types.LayoutPage:
    return types.LayoutPage(tuple(map(_layout, message.layouts)), message.next_page_token)


def _layout(message: store_pb.LayoutInfo) -> types.Layout:
    return types.Layout(
        layout_id=message.layout_id,
        base_model=message.base_model,
        other_base_models=tuple(message.other_base_models),
        aliases=tuple(message.aliases),
        max_ranks=tuple(message.max_ranks),
        images=message.images,
        image_bytes=message.image_bytes,
        create_time=time_of(message.create_time),
        last_use_time=time_of(message.last_use_time),
    )


def num_images(message: store_pb.ForgetLayoutResponse) -> int:
    return message.images


def only_adapter(
    message: store_pb.GetAdapterResponse
    | store_pb.PinAdapterResponse
    | store_pb.UnpinAdapterResponse,
) -> types.Adapter:
    return adapter(message.adapter)


def registration(
    message: store_pb.RegisterAdapterResponse | store_pb.UploadAdapterResponse,
) -> types.Registration:
    source = BASE_MODEL_SOURCES.get(message.base_model_source, types.BaseModelSource.UNKNOWN)
    return types.Registration(
        adapter(message.adapter),
        message.revision,
        tuple(message.deleted_versions),
        source,
        message.base_model_reason,
        tuple(message.ignored_config_keys),
        warnings=tuple(message.warnings),
    )


def rollback(message: store_pb.RollbackAdapterResponse) -> types.Registration:
    return types.Registration(adapter(message.adapter), message.revision)


def pruned_page(message: store_pb.PruneVersionsResponse) -> types.PrunedPage:
    return types.PrunedPage(tuple(message.deleted_versions), message.revision, message.has_more)


def adapter_page(message: store_pb.ListAdaptersResponse) -> types.AdapterPage:
    adapters = tuple(adapter(each) for each in message.adapters)
    return types.AdapterPage(adapters, message.next_page_token, message.revision)


def version_page(message: store_pb.ListVersionsResponse) -> types.VersionPage:
    adapters = tuple(adapter(each) for each in message.adapters)
    return types.VersionPage(
        adapters, message.next_page_token, message.current_version, message.revision
    )


def revision(message: store_pb.DeleteAdapterResponse) -> int:
    return message.revision


def event(message: store_pb.WatchAdaptersResponse) -> types.AdapterEvent:
    return types.AdapterEvent(
        revision=message.event.revision,
        kind=EVENT_KINDS.get(message.event.kind, types.EventKind.UNKNOWN),
        name=message.event.name,
        version=message.event.version,
        digest=message.event.digest,
        time=time_of(message.event.time),
    )


def store_status(message: store_pb.GetStoreStatusResponse) -> types.StoreStatus:
    return types.StoreStatus(
        version=message.version,
        revision=message.revision,
        adapters=message.adapters,
        layouts=message.layouts,
        memory=_tier_status(message.memory),
        disk=_tier_status(message.disk),
        blob_bytes=message.blob_bytes,
        active_pulls=message.active_pulls,
        memory_locked=message.memory_locked,
        memory_unlocked_reason=message.memory_unlocked_reason,
    )


def _tier_status(message: store_pb.TierStatus) -> types.TierStatus:
    return types.TierStatus(
        used_bytes=message.used_bytes,
        capacity_bytes=message.capacity_bytes,
        images=message.images,
        hits=message.hits,
        misses=message.misses,
        evictions=message.evictions,
    )
