"""Every RPC x who calls x whose adapter it is about, each a cell, over one real server."""

from __future__ import annotations

import itertools
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from adapter_store import build as store_module
from adapter_store.catalog.tables.filters import encode_version_token
from adapter_store.checkpoint.open import open_checkpoint
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from servicekit.refs import parse_name
from tests.support.access.policies import (
    ROOT,
    answer_of,
    counted_statements,
    token_lines,
    token_of,
    write_policy,
)
from tests.support.store.access_calls import (
    ABOUT_OTHERS,
    ALLOWED,
    ASK,
    CALLERS,
    OTHER,
    OWN,
    SERVICE,
    House,
    files_of,
)
from tests.support.store.adapters import save_adapter, tiny_layout
from tests.support.store.client import Client

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def never_due():
    """The store does not ask its catalog every second, among statements that are counted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "DUE_SECONDS", 3600)
        yield


@pytest.fixture(scope="module")
def house(never_due, serve_shared, shared_folder):
    roles = ["reader", "publisher", "server", "admin", "caller"]
    policy = write_policy(shared_folder, ROOT, *(token_lines(role, [role]) for role in roles))
    served = serve_shared(policy_file=policy, bookmark_seconds=0.05, collect_seconds=3600)
    clients = {name: served.connect(token) for name, token in CALLERS.items()}
    root = clients["root"]
    folders = {
        content: save_adapter(shared_folder / content, seed=seed)
        for seed, content in enumerate((OWN, OTHER, "old"))
    }
    for tenant in (OWN, OTHER):
        (folders[tenant] / "chat_template.jinja").write_text(tenant)
    digests = {
        tenant: root.register(f"{tenant}/kept", folders[tenant]).adapter.digest
        for tenant in (OWN, OTHER)
    }
    layout_id = root.register_layout(tiny_layout())
    served.idle()
    return House(served, clients, layout_id, folders, digests, itertools.count())


def expected(rpc: str, caller: str, tenant: str) -> str:
    if caller in ("nobody", "stranger"):
        return "UNAUTHENTICATED"
    if caller not in ALLOWED[rpc]:
        return "PERMISSION_DENIED"
    if tenant == OWN or caller == "root":
        return "OK"
    return ABOUT_OTHERS.get(rpc, "NOT_FOUND")


def test_the_table_has_every_rpc():
    assert set(ASK) == set(ALLOWED) == set(SERVICE.methods_by_name)


@pytest.mark.parametrize("rpc", ASK)
def test_each_caller_gets_what_it_may(house, rpc):
    outcomes = {}
    for caller, tenant in itertools.product(CALLERS, (OWN, OTHER)):
        try:
            outcome = ASK[rpc](house, house.clients[caller], tenant)
        except grpc.RpcError as error:
            outcome = error.code().name
        outcomes[caller, tenant] = outcome
    assert outcomes == {each: expected(rpc, *each) for each in outcomes}


ABSENT = {
    "GetAdapter": lambda stub, name: stub.GetAdapter(pb.GetAdapterRequest(ref=name)),
    "GetAdapter of a version": lambda stub, name: stub.GetAdapter(
        pb.GetAdapterRequest(ref=f"{name}@1")
    ),
    "DeleteAdapter": lambda stub, name: stub.DeleteAdapter(pb.DeleteAdapterRequest(name=name)),
    "DeleteAdapter of a version": lambda stub, name: stub.DeleteAdapter(
        pb.DeleteAdapterRequest(name=name, version=1)
    ),
    "ListVersions": lambda stub, name: stub.ListVersions(pb.ListVersionsRequest(name=name)),
    "RollbackAdapter": lambda stub, name: stub.RollbackAdapter(
        pb.RollbackAdapterRequest(name=name, version=1)
    ),
    "PruneVersions": lambda stub, name: stub.PruneVersions(
        pb.PruneVersionsRequest(name=name, keep=1)
    ),
    "PinAdapter": lambda stub, name: stub.PinAdapter(pb.PinAdapterRequest(ref=name)),
    "UnpinAdapter": lambda stub, name: stub.UnpinAdapter(pb.UnpinAdapterRequest(ref=name)),
    "RegisterAdapter": lambda stub, name: stub.RegisterAdapter(
        pb.RegisterAdapterRequest(name=name, source_uri="file:///nowhere")
    ),
    "UploadAdapter": lambda stub, name: stub.UploadAdapter(
        iter([pb.UploadAdapterRequest(meta=pb.UploadMeta(name=name))])
    ),
}


def refusal(house: House, call) -> tuple[object, ...]:
    """How the admin of team-a is answered, and the statements that took."""
    house.served.idle()
    with counted_statements() as statements, pytest.raises(grpc.RpcError) as caught:
        call(house.clients["admin"].stub)
    # What would make something of the tenant's is refused before anything is looked up.
    assert bool(statements) == (caught.value.code() is grpc.StatusCode.NOT_FOUND)
    return (*answer_of(caught.value), statements)


@pytest.mark.parametrize("rpc", ABSENT)
def test_not_yours_and_not_there_are_one_answer(house, rpc):
    name = f"{OTHER}/n{next(house.numbers)}"

    def call(stub):
        return ABSENT[rpc](stub, name)

    absent = refusal(house, call)
    house.clients["root"].register(name, house.folders["old"])
    house.clients["root"].register(name, house.folders[OTHER])
    assert refusal(house, call) == absent
    assert house.clients["root"].get(name).version == 2


def test_forged_page_token_reveals_nothing(house, refused):
    names = [f"{OTHER}/kept", f"{OTHER}/n{next(house.numbers)}"]
    answers = []
    for name in names:
        request = pb.ListVersionsRequest(
            name=name, page_token=encode_version_token(parse_name(name), 9)
        )
        with counted_statements() as statements:
            answers.append((house.clients["admin"].stub.ListVersions(request), statements))
    assert answers[0] == answers[1]
    assert (len(answers[0][0].adapters), answers[0][0].current_version) == (0, 0)
    huge = encode_version_token(parse_name(names[0]), 10**30)
    request = pb.ListVersionsRequest(name=names[0], page_token=huge)
    with refused("INVALID_ARGUMENT", "page_token"):
        house.clients["admin"].stub.ListVersions(request)


@pytest.mark.parametrize(
    ("rpc", "seed"), [("GetAdapter", 70), ("PinAdapter", 71), ("PullAdapter", 72)]
)
def test_not_yours_and_not_there_are_one_answer_by_digest(house, shared_folder, rpc, seed):
    folder = save_adapter(shared_folder / rpc, seed=seed)
    digest = open_checkpoint(folder).digest
    calls = {
        "GetAdapter": lambda stub: stub.GetAdapter(pb.GetAdapterRequest(ref=digest)),
        "PinAdapter": lambda stub: stub.PinAdapter(pb.PinAdapterRequest(ref=digest)),
        "PullAdapter": lambda stub: next(
            stub.PullAdapter(pb.PullAdapterRequest(digest=digest, layout_id=house.layout_id))
        ),
    }
    absent = refusal(house, calls[rpc])
    name = f"{OTHER}/n{next(house.numbers)}"
    house.clients["root"].register(name, folder)
    assert refusal(house, calls[rpc]) == absent
    # It is there: in memory by now, and for its own tenant.
    assert house.clients["root"].pull(digest, house.layout_id).is_whole
    assert refusal(house, calls[rpc]) == absent
    house.clients["admin"].register(f"{OWN}/n{next(house.numbers)}", folder)
    calls[rpc](house.clients["admin"].stub)


def test_a_digest_of_two_tenants_shows_each_its_own_record(house, shared_folder):
    folder = save_adapter(shared_folder / "both", seed=77)
    root, admin = house.clients["root"], house.clients["admin"]
    digest = root.register("team-0/first", folder).adapter.digest
    root.register("team-a/mine", folder)
    assert root.get(digest).name == "team-0/first"
    assert admin.get(digest).name == "team-a/mine"


def test_a_server_asks_on_behalf_of_its_callers(house, shared_folder):
    """One that serves all tenants learns what each of them would be told."""
    folder = save_adapter(shared_folder / "asked", seed=79)
    root, admin = house.clients["root"], house.clients["admin"]
    digest = root.register("team-b/asked", folder).adapter.digest
    house.served.idle()  # what is compiled ahead asks the catalog, too

    def ask(client: Client, ref: str, *tenants: str) -> object:
        request = pb.GetAdapterRequest(ref=ref, tenants=tenants)
        with counted_statements() as statements:
            try:
                answer = client.stub.GetAdapter(request).adapter.name
            except grpc.RpcError as error:
                answer = answer_of(error)
        return answer, len(statements)

    nowhere = "sha256:" + "0" * len(digest.removeprefix("sha256:"))
    for ref in (digest, "team-b/asked"):
        assert ask(root, ref, "team-b")[0] == ask(root, ref)[0] == "team-b/asked"
        assert ask(root, ref, "team-a") == ask(admin, ref) == ask(admin, ref, "team-b")
    refused, absent = ask(root, digest, "team-a"), ask(root, nowhere)
    assert refused[1] == absent[1]
    assert str(refused[0]).replace(digest, nowhere) == str(absent[0])


def test_base_model_of_another_tenant(house, shared_folder, refused):
    folder = save_adapter(shared_folder / "based", seed=78)
    root, reader = house.clients["root"], house.clients["reader"]
    digest = root.register("team-b/based", folder).adapter.digest
    root.register("team-a/based", folder, base_model="org/another")
    assert root.pull(digest, house.layout_id).is_whole
    with refused("FAILED_PRECONDITION", "not registered for base model"):
        reader.pull(digest, house.layout_id)


def test_names_without_a_tenant_mean_the_home(house):
    publisher = house.clients["publisher"]
    made = publisher.register("home-made", house.folders[OWN]).adapter
    assert made.name == "team-a/home-made"
    assert publisher.get("home-made@1").name == "team-a/home-made"
    publisher.stub.DeleteAdapter(pb.DeleteAdapterRequest(name="home-made"))
    root = house.clients["root"]
    assert root.register("home-made", house.folders[OWN]).adapter.name == "default/home-made"


@pytest.mark.parametrize("rpc", ["RegisterAdapter", "UploadAdapter"])
def test_only_an_admin_registers_pinned(house, refused, rpc):
    name = f"{OWN}/n{next(house.numbers)}"

    def ask(caller: str):
        client = house.clients[caller]
        if rpc == "RegisterAdapter":
            return client.register(name, house.folders[OWN], pinned=True)
        return client.upload(name, files_of(house.folders[OWN]), pinned=True)

    with refused("PERMISSION_DENIED", "pinned"):
        ask("publisher")
    with refused("NOT_FOUND"):
        house.clients["root"].get(name)
    assert ask("admin").adapter.pinned
    house.clients["root"].stub.UnpinAdapter(pb.UnpinAdapterRequest(ref=name))


def test_the_role_is_looked_at_before_the_arguments(house, refused):
    with refused("PERMISSION_DENIED"):
        house.clients["reader"].register("NOT A NAME", house.folders[OWN])


def test_pages_go_on_within_the_callers_tenants(house):
    root, reader = house.clients["root"], house.clients["reader"]
    for _ in range(3):
        root.register(f"{OWN}/n{next(house.numbers)}", house.folders[OWN])
    for tenant in ("team-0", OTHER, "team-c"):
        root.register(f"{tenant}/n{next(house.numbers)}", house.folders[OWN])
    found, token = [], ""
    while True:
        page = reader.stub.ListAdapters(pb.ListAdaptersRequest(page_size=2, page_token=token))
        found += [adapter.name for adapter in page.adapters]
        token = page.next_page_token
        if not token:
            break
    own = root.stub.ListAdapters(pb.ListAdaptersRequest(filter=f"tenant={OWN}", page_size=1000))
    assert found == [adapter.name for adapter in own.adapters]
    assert len(found) >= 4


def test_a_list_on_behalf_of_tenants_is_theirs_alone(house):
    root = house.clients["root"]
    for tenant in (OWN, OTHER):
        root.register(f"{tenant}/n{next(house.numbers)}", house.folders[OWN])

    def tenants_in(client, *tenants: str) -> set[str]:
        request = pb.ListAdaptersRequest(page_size=1000, tenants=tenants)
        return {a.name.partition("/")[0] for a in client.stub.ListAdapters(request).adapters}

    assert tenants_in(root) >= {OWN, OTHER}
    assert tenants_in(root, OWN) == {OWN}
    assert tenants_in(root, OWN, OTHER) == {OWN, OTHER}
    assert tenants_in(house.clients["reader"], OTHER) == set()


def test_a_watch_is_never_behind_what_it_may_not_see(house):
    root, reader = house.clients["root"], house.clients["reader"]
    newest = root.stub.GetStoreStatus(pb.GetStoreStatusRequest()).revision
    watch = reader.stub.WatchAdapters(pb.WatchAdaptersRequest(since_revision=newest))
    last = newest
    for i in range(5):
        made = root.register(f"{OTHER}/n{next(house.numbers)}", house.folders["old"]).revision
        while last < made:
            event = next(watch).event
            assert (event.kind, event.name) == (pb.EVENT_KIND_BOOKMARK, "")
            assert event.revision >= last
            last = event.revision
        assert last == newest + i + 1
    made = root.register(f"{OWN}/n{next(house.numbers)}", house.folders["old"])
    for response in watch:
        if response.event.kind == pb.EVENT_KIND_REGISTERED:
            break
    assert (response.event.name, response.event.revision) == (made.adapter.name, made.revision)
    watch.cancel()


@pytest.mark.parametrize("caller", ["nobody", "stranger", "reader"])
def test_health_is_open_and_reflection_is_not(house, refused, caller):
    channel = house.clients[caller].channel
    response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert response.status == health_pb2.HealthCheckResponse.SERVING
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    if caller == "reader":
        (answer,) = stub.ServerReflectionInfo(requests)
        assert answer.list_services_response.service
    else:
        with refused("UNAUTHENTICATED", "authorization"):
            next(stub.ServerReflectionInfo(requests))


@pytest.mark.parametrize("rpc", ALLOWED)
@pytest.mark.parametrize("caller", ["nobody", "stranger"])
def test_without_a_token_nothing_of_a_call_is_read(house, rpc, caller):
    """The caller sends nothing at all, and is answered."""
    never = threading.Event()

    def requests():
        never.wait()
        yield b""

    metadata = (("authorization", f"Bearer {CALLERS[caller]}"),) if CALLERS[caller] else ()
    call = house.clients["nobody"].channel.stream_stream(f"/{SERVICE.full_name}/{rpc}")(
        requests(), timeout=60, metadata=metadata
    )
    try:
        assert call.code() is grpc.StatusCode.UNAUTHENTICATED
    finally:
        never.set()


@pytest.mark.parametrize(
    "value", ["", "Bearer", "Bearer ", "Basic secret", token_of("reader"), "Bearer  x"]
)
def test_other_forms_of_a_token_are_no_token(house, refused, value):
    stub = house.clients["nobody"].stub
    with refused("UNAUTHENTICATED", "authorization"):
        stub.GetAdapter(pb.GetAdapterRequest(ref="kept"), metadata=(("authorization", value),))


def test_the_schemes_case_does_not_matter(house):
    metadata = (("authorization", f"bearer {token_of('reader')}"),)
    request = pb.GetAdapterRequest(ref="kept")
    assert house.clients["nobody"].stub.GetAdapter(request, metadata=metadata).adapter.version == 1
