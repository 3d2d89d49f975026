"""What servers announce beside a layout lasts as long as they do, and compiles nothing."""

from __future__ import annotations

from datetime import timedelta

import pytest

from adapter_store.api.convert import to_adapter
from adapter_store.catalog.catalog import Catalog
from adapter_store.catalog.tables.announcements import (
    MAX_PER_LAYOUT,
    RENEW_AFTER,
    REPLICA_RENEWS_WITHIN,
)
from adapter_store.catalog.tables.layouts import LayoutLimits
from adapter_store.catalog.tables.lookup import LASTS_FOR, MAX_SKEW_MICROS, PRESENT_FOR
from adapter_store.core import Announcement, ImageContent, ImageKey, ImageState, LayoutVerdict, Part
from adapter_store.errors import LimitExceeded
from contract.images.segment_kinds import FURTHER_KINDS, SegmentKind
from servicekit.refs import AdapterName
from tests.support.store.catalogs import BASE, Names

SECOND = timedelta(seconds=1)
TTL = timedelta(days=1)


@pytest.fixture
def announced(catalog):
    """The layout "L", announced as "A" with an alias and ranks up to 16."""
    catalog.layouts.add("L", BASE, "{}")
    assert catalog.servers.announce("L", "A", Announcement(("alias", "both"), 16))
    return catalog


@pytest.fixture
def shared(place, clock):
    """A catalog whose layouts are live for a day, of which an account may have half of a place."""
    catalog = Catalog(
        place,
        event_retention=1000,
        layout_ttl=TTL,
        layout_limits=LayoutLimits(share=0.5),
        clock=clock,
    )
    yield catalog
    catalog.close()


def limits(names) -> list[tuple[str, int]]:
    (verdict,) = names.get("a").verdicts
    return [(server.announcement_id, server.max_rank) for server in verdict.servers]


def test_servers_are_there_for_a_while_after_a_renewal(announced, names, clock):
    names.register("a", "d1")
    assert limits(names) == [("A", 16)]
    clock.now += PRESENT_FOR - SECOND
    assert announced.servers.renew("A") == "L"
    clock.now += PRESENT_FOR - SECOND
    assert limits(names) == [("A", 16)]
    clock.now += 2 * SECOND
    assert limits(names) == []
    assert [each.max_ranks for each in announced.layouts.page()[0]] == [()]
    assert announced.servers.renew("A") == "L"
    assert limits(names) == [("A", 16)]


def test_servers_that_have_gone_are_there_no_more(announced, names, clock):
    names.register("a", "d1")
    clock.now += SECOND
    announced.servers.withdraw("A", announced.servers.last_renewal("A"))
    if announced.database.is_shared:  # another replica may have servers that announce the same
        assert limits(names) == [("A", 16)]
        clock.now += REPLICA_RENEWS_WITHIN
    assert limits(names) == []
    assert announced.layouts.served() == ["L"]
    assert announced.servers.is_renewal_due("A")
    announced.servers.renew("A")
    assert limits(names) == [("A", 16)]


def test_what_was_renewed_meanwhile_is_not_withdrawn(announced, names, clock):
    names.register("a", "d1")
    last_renewal = announced.servers.last_renewal("A")
    clock.now += SECOND
    announced.servers.announce("L", "A", Announcement(("alias", "both"), 16))
    announced.servers.withdraw("A", last_renewal)
    clock.now += REPLICA_RENEWS_WITHIN
    assert limits(names) == [("A", 16)]


def test_server_that_renews_nothing_is_not_withdrawn(catalog, names, clock):
    catalog.layouts.add("L", BASE, "{}")
    catalog.servers.announce("L", "old", Announcement(is_renewed=False))
    names.register("a", "d1")
    catalog.servers.withdraw("old", catalog.servers.last_renewal("old"))
    clock.now += LASTS_FOR
    assert limits(names) == [("old", 0)]


def test_announcement_lasts_an_hour_after_its_renewals(announced, clock):
    clock.now += LASTS_FOR - SECOND
    assert announced.servers.renew("A") == "L"
    clock.now += LASTS_FOR - SECOND
    assert announced.layouts.served() == ["L"]
    assert announced.servers.expire() == 0
    clock.now += 2 * SECOND
    assert announced.layouts.served() == []
    assert announced.layouts.bases("L") == ["alias", "both", BASE]  # the store may have been away
    assert announced.servers.expire() == 1
    assert announced.layouts.bases("L") == [BASE]
    assert announced.servers.renew("A") is None


def test_alias_stays_while_a_server_has_it(announced, clock):
    clock.now += LASTS_FOR - SECOND
    assert announced.servers.announce("L", "B", Announcement(("both", "new")))
    assert not announced.servers.announce("L", "C", Announcement(("new",)))
    clock.now += 2 * SECOND
    assert announced.servers.expire() == 1
    assert announced.layouts.bases("L") == ["both", "new", BASE]
    assert announced.names.known_base_models(AdapterName("default", "x")).served == {
        BASE: {BASE, "both", "new"}
    }


def test_renewals_are_due_thrice_while_servers_count_as_there(announced, clock):
    assert not announced.servers.is_renewal_due("A")
    assert announced.servers.is_renewal_due("unknown")
    assert 3 * RENEW_AFTER + timedelta(microseconds=MAX_SKEW_MICROS) <= PRESENT_FOR
    clock.now += RENEW_AFTER
    assert announced.servers.is_renewal_due("A")
    announced.servers.renew("A")
    assert not announced.servers.is_renewal_due("A")


def test_server_that_renews_nothing_is_known_as_long_as_its_layout_is_in_use(shared, clock):
    shared.layouts.add("L", BASE, "{}")
    names = Names(shared)
    names.register("a", "d1")
    shared.servers.announce("L", "old", Announcement(("alias of old",), is_renewed=False))
    clock.now += TTL - SECOND
    assert shared.layouts.use("L") is False  # what is pulled for it shows that it lives
    clock.now += TTL - SECOND
    assert shared.servers.expire() == 0
    assert (shared.layouts.served(), limits(names)) == (["L"], [("old", 0)])
    clock.now += 2 * SECOND
    assert shared.servers.expire() == 0
    assert (shared.layouts.served(), limits(names)) == ([], [])
    assert [each.max_ranks for each in shared.layouts.page()[0]] == [()]
    assert shared.names.known_base_models(AdapterName("default", "x")).served == {}
    assert shared.layouts.use("L")  # it had no adapters to pull
    assert (shared.layouts.served(), limits(names)) == (["L"], [("old", 0)])
    assert shared.layouts.bases("L") == ["alias of old", BASE]


def shown(catalog, names) -> tuple[list[str], list[tuple[int, ...]]]:
    """The announcements in an adapter's verdicts, and the ranks in the list of layouts."""
    ranks = [each.max_ranks for each in catalog.layouts.page()[0]]
    return [announcement_id for announcement_id, _ in limits(names)], ranks


@pytest.fixture
def upgraded(catalog, names, clock):
    """A layout whose servers of an earlier release have been replaced."""
    catalog.layouts.add("L", BASE, "{}")
    catalog.servers.announce("L", "old", Announcement(("alias of old",), is_renewed=False))
    names.register("a", "d1")
    assert shown(catalog, names) == (["old"], [(0,)])
    clock.now += PRESENT_FOR
    catalog.servers.announce("L", "new", Announcement(("alias",), 16))
    assert shown(catalog, names) == (["new"], [(16,)])
    assert catalog.layouts.bases("L") == ["alias", "alias of old", BASE]
    return catalog


@pytest.mark.parametrize("is_told", [True, False])
def test_replaced_servers_come_back_with_none_of_their_successors(upgraded, names, clock, is_told):
    clock.now += SECOND
    if is_told:
        upgraded.servers.withdraw("new", upgraded.servers.last_renewal("new"))
    for wait in (PRESENT_FOR, LASTS_FOR, LASTS_FOR):
        clock.now += wait
        assert shown(upgraded, names) == ([], [()])
    assert upgraded.servers.expire() == 2
    assert shown(upgraded, names) == ([], [()])
    assert upgraded.layouts.served() == []
    assert upgraded.layouts.bases("L") == [BASE]


def test_servers_of_an_earlier_release_may_replace_later_ones(upgraded, names, clock):
    clock.now += SECOND
    upgraded.servers.announce("L", "old", Announcement(("alias of old",), is_renewed=False))
    assert shown(upgraded, names) == (["new"], [(16,)])
    clock.now += PRESENT_FOR
    assert shown(upgraded, names) == (["old"], [(0,)])
    clock.now += LASTS_FOR
    assert upgraded.servers.expire() == 1
    assert shown(upgraded, names) == (["old"], [(0,)])
    assert upgraded.layouts.served() == ["L"]
    assert upgraded.layouts.bases("L") == ["alias of old", BASE]


def test_layout_has_a_bounded_number_of_announcements(announced, clock):
    for number in range(MAX_PER_LAYOUT - 1):
        announced.servers.announce("L", f"N{number}", Announcement(max_rank=number))
    with pytest.raises(LimitExceeded, match=r"at most 16 are allowed; one expires") as caught:
        announced.servers.announce("L", "more", Announcement())
    assert caught.value.reason == "ANNOUNCEMENT_LIMIT"
    announced.servers.announce("L", "A", Announcement(("alias", "both"), 16))
    clock.now += LASTS_FOR
    announced.servers.announce("L", "more", Announcement())


def test_announcements_of_one_account_leave_places_to_others(shared):
    shared.layouts.add("L", BASE, "{}")
    for number in range(MAX_PER_LAYOUT // 2):
        shared.servers.announce("L", f"a{number}", Announcement(max_rank=number), "a")
    with pytest.raises(LimitExceeded, match="8 different announcements by a and 0 by others"):
        shared.servers.announce("L", "more", Announcement(), "a")
    shared.servers.announce("L", "a0", Announcement(max_rank=0), "a")
    for number in range(4):
        shared.servers.announce("L", f"b{number}", Announcement(max_rank=number), "b")
    with pytest.raises(LimitExceeded, match="4 different announcements by b and 8 by others"):
        shared.servers.announce("L", "more", Announcement(), "b")


def test_verdict_is_of_the_adapter_and_the_announcement(announced, names):
    announced.servers.announce("L", "B", Announcement(max_rank=8))
    announced.servers.announce("L", "C", Announcement())
    names.register("a", "d1", rank=12)
    record = names.get("a")
    (verdict,) = record.verdicts
    assert [server.refusal(record, verdict) for server in verdict.servers] == [
        "",
        "rank 12 is above this server's limit 8 (--max-rank)",
        "",
    ]
    announced.images.set_verdict("d1", LayoutVerdict("L", ImageState.READY, "", 256))
    (verdict,) = names.get("a").verdicts
    assert [server.announcement_id for server in verdict.servers] == ["C", "B", "A"]


REFUSALS = [
    (
        Announcement(lora_targets=("o_proj", "q_proj")),
        {"targets": ("k_proj", "q_proj", "v_proj")},
        "targets k_proj, v_proj are not among this server's --lora-targets (o_proj, q_proj)",
    ),
    (
        Announcement(lora_targets=("q_proj",)),
        {},
        "target v_proj is not among this server's --lora-targets (q_proj)",
    ),
    (Announcement(lora_targets=("o_proj", "q_proj", "v_proj")), {}, ""),
    (
        Announcement(),
        {"segment_kinds": (SegmentKind.MAGNITUDE, SegmentKind.BIAS)},
        "it has biases of LoRA, which this server does not apply; "
        "it has DoRA magnitudes, which this server does not apply",
    ),
    (
        Announcement(segment_kinds=(SegmentKind.MAGNITUDE,)),
        {"segment_kinds": (SegmentKind.MAGNITUDE,)},
        "",
    ),
    (
        Announcement(max_added_tokens=2),
        {"added_tokens": 3},
        "tokens that it adds to the vocabulary: 3, above this server's limit 2 "
        "(--max-added-tokens)",
    ),
    (
        Announcement(),
        {"added_tokens": 1},
        "tokens that it adds to the vocabulary: 1, above this server's limit 0 "
        "(--max-added-tokens)",
    ),
    (Announcement(max_added_tokens=3), {"added_tokens": 3}, ""),
    (
        Announcement(),
        {"invocation_tokens": (7, 8)},
        "it has invocation tokens (aLoRA), which this server does not apply",
    ),
    (Announcement(applies_invocation_tokens=True), {"invocation_tokens": (7, 8)}, ""),
    (
        Announcement(part=Part(2, 1)),
        {"uneven_experts": ("down_proj", "up_proj")},
        "its experts have A and B of different sizes, or some have none: down_proj, up_proj; with "
        "--expert-parallel each process must get as many bytes as the others: serve it without "
        "the setting",
    ),
    (
        Announcement(part=Part(2, 0)),
        {"shared_biases": ("o_proj.bias",)},
        "it has biases in place of the base's, which this server does not apply with "
        "--fully-sharded-loras: o_proj.bias; serve it without the setting",
    ),
    (Announcement(), {"uneven_experts": ("up_proj",), "shared_biases": ("o_proj.bias",)}, ""),
    (
        Announcement(max_rank=8, lora_targets=("q_proj",)),
        {"rank": 12, "targets": tuple(f"t{number:02}" for number in range(10))},
        "rank 12 is above this server's limit 8 (--max-rank); "
        "targets t00, t01, t02, t03, t04, t05, t06, t07 and 2 more "
        "are not among this server's --lora-targets (q_proj)",
    ),
]


@pytest.mark.parametrize(("announcement", "fields", "reason"), REFUSALS)
def test_verdict_names_what_is_refused(catalog, names, announcement, fields, reason):
    catalog.layouts.add("L", BASE, "{}")
    catalog.servers.announce("L", "A", announcement)
    of_image = {key: fields[key] for key in fields if key in ImageContent._fields[3:]}
    names.register("a", "d1", **{key: fields[key] for key in fields if key not in of_image})
    record = names.get("a")
    changes = ImageContent(record.targets, record.segment_kinds, **of_image)
    catalog.images.set_verdict("d1", LayoutVerdict("L", ImageState.READY, "", 256, content=changes))
    assert refusals(names) == [reason]


@pytest.mark.parametrize(
    ("in_config", "form", "note"),
    [
        (
            "unsloth/llama-bnb-4bit",
            "int4",
            "trained on the nf4 form of the base model, served on int4: answers may differ; "
            "serve the nf4 checkpoint for the answers of training",
        ),
        (
            "org/llama-FP8",
            "",
            "trained on the fp8 form of the base model, served on plain weights: answers may "
            "differ; serve the fp8 checkpoint for the answers of training",
        ),
        ("unsloth/llama-bnb-4bit", "nf4", ""),
        ("org/llama-GGUF", "gguf q4_k", ""),
        ("org/llama", "int4", ""),
        ("", "int4", ""),
    ],
)
def test_server_of_another_form_of_the_base_is_noted(catalog, names, in_config, form, note):
    catalog.layouts.add("L", BASE, "{}")
    catalog.servers.announce("L", "A", Announcement(weight_form=form))
    names.register("a", "d1", config_base_model=in_config)
    record = names.get("a")
    (verdict,) = record.verdicts
    (server,) = verdict.servers
    assert server.note(record.config_base_model) == note
    message = to_adapter(record)
    assert message.layout_states[0].servers[0].note == note
    assert record.message_bytes >= message.ByteSize()


def refusals(names) -> list[str]:
    record = names.get("a")
    (verdict,) = record.verdicts
    return [server.refusal(record, verdict) for server in verdict.servers]


def test_what_an_image_changes_decides(catalog, names):
    """The adapter calls q, k and v by one name, and has a head that equals the base's."""
    catalog.layouts.add("L", BASE, "{}")
    announced = Announcement(lora_targets=("k_proj", "q_proj", "v_proj"), max_added_tokens=1)
    catalog.servers.announce("L", "A", announced)
    kinds = (SegmentKind.FULL, SegmentKind.BIAS)
    names.register("a", "d1", targets=("lm_head", "qkv_proj"), segment_kinds=kinds)
    biases = "it has biases of LoRA, which this server does not apply"
    assert refusals(names) == [biases]
    key = ImageKey("d1", "L")
    catalog.images.set_fits(key, 0, ImageContent(("k_proj", "q_proj", "v_proj"), ()))
    assert refusals(names) == [""]
    catalog.images.set_fits(key, 0, ImageContent(("lm_head",), ()))
    assert refusals(names) == [""], "what was recorded first stays"
    names.catalog.images.set_verdict("d1", LayoutVerdict("L", ImageState.COMPILING))
    assert refusals(names) == [""]
    content = ImageContent(("q_proj",), (), added_tokens=1, unused_spaces=("vision_tower",))
    catalog.images.set_verdict("d1", LayoutVerdict("L", ImageState.READY, "", 256, content=content))
    assert refusals(names) == [""]
    assert names.get("a").verdicts[0].content == content
    kinds, of = (SegmentKind.ROW_IDS, SegmentKind.ROWS, SegmentKind.FULL), ("lm_head",)
    content = ImageContent(("lm_head", "q_proj"), kinds, (of, of, ("k_proj.bias", "q_proj")))
    catalog.images.set_verdict("d1", LayoutVerdict("L", ImageState.READY, "", 256, content=content))
    assert refusals(names) == [
        "target lm_head is not among this server's --lora-targets (k_proj, q_proj, v_proj); "
        "it has rows of its own for tokens, which this server does not apply: lm_head; save the "
        "adapter without it, and adapt a matrix with A and B instead; "
        "it has whole weights of its own, which this server does not apply: k_proj.bias, q_proj; "
        "save the adapter without it, and adapt a matrix with A and B instead"
    ]


def test_images_of_the_release_before_change_what_their_adapters_name(catalog, names):
    catalog.layouts.add("L", BASE, "{}")
    catalog.servers.announce("L", "A", Announcement(lora_targets=("q_proj",)))
    names.register("a", "d1", targets=("q_proj", "v_proj"))
    catalog.images.set_verdict("d1", LayoutVerdict("L", ImageState.READY, "", 256))
    assert refusals(names) == ["target v_proj is not among this server's --lora-targets (q_proj)"]


def test_what_an_adapter_has_is_kept(names):
    has = {"segment_kinds": FURTHER_KINDS, "invocation_tokens": (5, 6, 5)}
    names.register("a", "d1", **has)
    names.register("b", "d2")
    record, plain = names.get("a"), names.get("b")
    assert set(record.segment_kinds) == set(FURTHER_KINDS)
    assert record.invocation_tokens == (5, 6, 5)
    assert (plain.segment_kinds, plain.added_tokens, plain.invocation_tokens) == ((), 0, ())


def test_models_of_one_layout_are_others_all_the_same(catalog, clock):
    """Equal shapes give equal images; whose servers are asked is another matter."""
    catalog.layouts.add("L", BASE, "{}")
    catalog.servers.announce("L", "A", Announcement(("alias",), 16, base_model=BASE))
    catalog.layouts.add("L", "other", "{}")
    assert catalog.servers.announce("L", "O", Announcement(("second",), 8, base_model="other"))
    names = Names(catalog)
    names.register("a", "d1")
    assert limits(names) == [("A", 16)]
    for base_model in ("other", "second"):
        names.register("b", "d2", base_model=base_model)
        (verdict,) = names.get("b").verdicts
        assert [each.announcement_id for each in verdict.servers] == ["O"]
    known = catalog.names.known_base_models(AdapterName("default", "x"))
    assert known.served == {BASE: {BASE, "alias"}, "other": {"other", "second"}}
    assert known.gone == frozenset()
    [layout] = catalog.layouts.page()[0]
    shown = (layout.base_model, layout.other_base_models, layout.aliases)
    assert shown == (BASE, ("other",), ("alias", "second"))
    clock.now += LASTS_FOR - SECOND
    catalog.servers.renew("A")
    clock.now += 2 * SECOND
    assert catalog.servers.expire() == 1
    assert catalog.layouts.bases("L") == ["alias", BASE]
    assert names.get("b").verdicts == ()


def test_added_tokens_are_known_once_an_image_is_planned(catalog, names):
    """Which rows are behind the base's vocabulary, only a layout says; servers differ in it."""
    for layout_id in ("L", "M"):
        catalog.layouts.add(layout_id, BASE, "{}")
    names.register("a", "d1")
    assert names.get("a").added_tokens == 0
    catalog.images.set_fits(
        ImageKey("d1", "L"), 0, ImageContent(("embed_tokens",), (), added_tokens=2)
    )
    assert names.get("a").added_tokens == 2
    content = ImageContent(("embed_tokens",), (), added_tokens=3)
    catalog.images.set_verdict("d1", LayoutVerdict("M", ImageState.READY, "", 256, content=content))
    assert names.get("a").added_tokens == 3


def test_verdicts_say_which_rank_they_are_about(catalog, names):
    first, part = "sha256:" + "a" * 64, Part(2, 0)
    second = Part(2, 1, first)
    for layout_id, id_, each in (("L", first, part), ("M", "B", second)):
        catalog.layouts.add(layout_id, BASE, "{}")
        catalog.servers.announce(layout_id, id_, Announcement(part=each))
    names.register("a", "d1")
    record = names.get("a")
    message = to_adapter(record)
    found = [
        (server.num_ranks, server.rank_index, server.first_announcement_id)
        for state in message.layout_states
        for server in state.servers
    ]
    assert found == [part, second]
    assert record.message_bytes >= message.ByteSize()
