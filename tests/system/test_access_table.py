"""Every RPC of the inference service x who calls x whose adapter it is about, each a cell."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from adapter_store.checkpoint.open import open_checkpoint
from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.inference.v1 import inference_pb2 as pb
from tests.support.access.inference_roles import ALLOWED, OPERATORS
from tests.support.access.policies import answer_of, token_lines, token_of
from tests.support.models.zoo import Zoo
from tests.support.pairs import pairwise
from tests.support.store.served import serving
from tests.system.guarded import OTHER, OWN, House, generate

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"]

# The name is that of the token, for team-a alone but the last two; "" sends none.
CALLERS = {
    "nobody": "",
    "stranger": token_of("unknown"),
    "reader": token_of("reader"),  # a role of the store only
    "publisher": token_of("publisher"),
    "caller": token_of("caller"),
    "operator": token_of("operator"),
    "both": token_of("both"),
    "neighbour": token_of("neighbour"),  # both, of team-b
    "root": token_of("root"),  # both, of every tenant
}
TOKENS = [
    token_lines("reader", ["reader"]),
    token_lines("publisher", ["publisher"]),
    token_lines("caller", ["caller"]),
    token_lines("operator", ["operator"]),
    token_lines("both", ["caller", "operator"]),
    token_lines("neighbour", ["caller", "operator"], [OTHER]),
]
SUBJECTS = ["base", "own name", "own digest", "other name", "other digest"]


class TableHouse(House):
    """With a stub for every caller, and each tenant's adapter `kept`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.stubs = {name: self.connect(token) for name, token in CALLERS.items()}
        self.digests = {
            tenant: self.register(f"{tenant}/kept", self.make()) for tenant in (OWN, OTHER)
        }

    def ref(self, subject: str) -> str:
        if subject == "base":
            return ""
        tenant = OWN if subject.startswith("own") else OTHER
        return f"{tenant}/kept" if subject.endswith("name") else self.digests[tenant]


@pytest.fixture(scope="module")
def house(
    zoos: Callable[[str], Zoo], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TableHouse]:
    folder = tmp_path_factory.mktemp("house")
    with serving(folder) as start:
        house = TableHouse(start, folder, zoos("llama"), *TOKENS)
        yield house
        house.close()


# One per RPC: calls it about a reference; what is listed says whether it is there.


def load(stub: Any, ref: str) -> None:
    stub.LoadAdapter(pb.LoadAdapterRequest(ref=ref), timeout=60)


def unload(stub: Any, ref: str) -> None:
    stub.UnloadAdapter(pb.UnloadAdapterRequest(ref=ref), timeout=60)


def embed(stub: Any, ref: str) -> None:
    request = pb.EmbedRequest(adapter=ref, inputs=[pb.EmbedInput(text="a")])
    assert list(stub.Embed(request, timeout=60))


def score(stub: Any, ref: str) -> None:
    """Whoever is let in learns that this tokenizer has no tokens to judge with."""
    try:
        list(stub.Score(pb.ScoreRequest(adapter=ref, query="a", documents=["b"]), timeout=60))
    except grpc.RpcError as error:
        if "no single token" not in str(error.details()):
            raise


def classify(stub: Any, ref: str) -> None:
    """Whoever is let in learns that there is no head."""
    request = pb.ClassifyRequest(adapter=ref, inputs=[pb.EmbedInput(text="a")])
    try:
        list(stub.Classify(request, timeout=60))
    except grpc.RpcError as error:
        if "has no classification head" not in str(error.details()):
            raise


def upload_image(stub: Any, ref: str) -> None:
    """Whoever is let in learns that this model reads no images."""
    request = pb.UploadImageRequest(upload=pb.ImageUpload(size_bytes=1))
    try:
        stub.UploadImage(iter([request, pb.UploadImageRequest(chunk=b"a")]), timeout=60)
    except grpc.RpcError as error:
        if "reads no images" not in str(error.details()):
            raise


def tokenize(stub: Any, ref: str) -> None:
    stub.Tokenize(pb.TokenizeRequest(adapter=ref, text="a"), timeout=60)


def detokenize(stub: Any, ref: str) -> None:
    stub.Detokenize(pb.DetokenizeRequest(adapter=ref, token_ids=[5]), timeout=60)


def inspect(stub: Any, ref: str) -> None:
    stub.InspectAdapter(pb.InspectAdapterRequest(ref=ref), timeout=60)


def pin(stub: Any, ref: str) -> None:
    stub.PinAdapter(pb.PinAdapterRequest(ref=ref), timeout=60)


def unpin(stub: Any, ref: str) -> None:
    stub.UnpinAdapter(pb.UnpinAdapterRequest(ref=ref), timeout=60)


def residents(stub: Any) -> dict[str, Any]:
    listed = stub.ListResidentAdapters(pb.ListResidentAdaptersRequest(), timeout=60)
    return {adapter.digest: adapter for adapter in listed.adapters}


def get_server_info(stub: Any, ref: str) -> None:
    stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60)


def list_residents(stub: Any, ref: str) -> None:
    residents(stub)


def get_debug_info(stub: Any, ref: str) -> None:
    assert list(stub.GetDebugInfo(pb.GetDebugInfoRequest(), timeout=60))


def profile_steps(stub: Any, ref: str) -> None:
    """Whoever is let in waits for a step that does not come."""
    request = pb.ProfileStepsRequest(num_steps=1, timeout_seconds=0.01)
    try:
        assert list(stub.ProfileSteps(request, timeout=60))
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise


def pause(stub: Any, ref: str) -> None:
    stub.PauseGeneration(pb.PauseGenerationRequest(), timeout=60)
    resume(stub, ref)


def resume(stub: Any, ref: str) -> None:
    stub.ResumeGeneration(pb.ResumeGenerationRequest(), timeout=60)


def sleep(stub: Any, ref: str) -> None:
    stub.Sleep(pb.SleepRequest(), timeout=60)
    wake(stub, ref)


def wake(stub: Any, ref: str) -> None:
    stub.Wake(pb.WakeRequest(), timeout=60)


ABOUT: dict[str, Callable[[Any, str], Any]] = {
    "Generate": generate,
    "Embed": embed,
    "Score": score,
    "Classify": classify,
    "Tokenize": tokenize,
    "Detokenize": detokenize,
    "InspectAdapter": inspect,
    "LoadAdapter": load,
    "UnloadAdapter": unload,
    "PinAdapter": pin,
    "UnpinAdapter": unpin,
}
ASK = ABOUT | {
    "UploadImage": upload_image,
    "ListResidentAdapters": list_residents,
    "GetServerInfo": get_server_info,
    "GetDebugInfo": get_debug_info,
    "ProfileSteps": profile_steps,
    "PauseGeneration": pause,
    "ResumeGeneration": resume,
    "Sleep": sleep,
    "Wake": wake,
}


def expected(rpc: str, caller: str, subject: str) -> str:
    if caller in ("nobody", "stranger"):
        return "UNAUTHENTICATED"
    if caller not in ALLOWED[rpc]:
        return "PERMISSION_DENIED"
    if rpc not in ABOUT:
        return "OK"
    if subject == "base":
        of_base = ("Generate", "Embed", "Score", "Classify", "Tokenize", "Detokenize")
        return "OK" if rpc in of_base else "INVALID_ARGUMENT"
    whose = OWN if subject.startswith("own") else OTHER
    tenants = {"neighbour": {OTHER}, "root": {OWN, OTHER}}.get(caller, {OWN})
    return "OK" if whose in tenants else "NOT_FOUND"


def test_the_table_has_every_rpc() -> None:
    assert set(ASK) == set(ALLOWED) == set(SERVICE.methods_by_name)


@pytest.mark.parametrize(
    ("rpc", "subject"),
    # An RPC that is about no adapter is called the same way whatever the subject.
    [(rpc, subject) for rpc in ASK for subject in (SUBJECTS if rpc in ABOUT else ["base"])],
)
def test_each_caller_gets_what_it_may(house: TableHouse, rpc: str, subject: str) -> None:
    root, ref = house.stubs["root"], house.ref(subject)
    outcomes = {}
    for caller, stub in house.stubs.items():
        if ref:
            # Resident, so that only access stands between a caller and it.
            load(root, ref)
        outcomes[caller] = "OK"
        try:
            ASK[rpc](stub, ref)
        except grpc.RpcError as error:
            outcomes[caller] = error.code().name
        if ref and rpc == "PinAdapter":
            unpin(root, ref)
    assert outcomes == {caller: expected(rpc, caller, subject) for caller in CALLERS}


def test_who_publishes_may_load_and_not_pin(house: TableHouse) -> None:
    request = pb.LoadAdapterRequest(ref=house.ref("own name"), pin=True)
    with pytest.raises(grpc.RpcError) as caught:
        house.stubs["publisher"].LoadAdapter(request, timeout=60)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("caller", sorted(OPERATORS))
def test_operators_see_what_is_resident_of_their_tenants(house: TableHouse, caller: str) -> None:
    for tenant in (OWN, OTHER):
        load(house.stubs["root"], f"{tenant}/kept")
    listed = residents(house.stubs[caller])
    seen = {tenant for tenant, digest in house.digests.items() if digest in listed}
    assert seen == {"neighbour": {OTHER}, "root": {OWN, OTHER}}.get(caller, {OWN})
    names = {name.partition("/")[0] for adapter in listed.values() for name in adapter.names}
    assert names <= seen


# --- not yours is not there ---------------------------------------------------------------------


def refusal(house: TableHouse, rpc: str, ref: str) -> tuple[Any, Any]:
    """All that a caller of team-a sees of its refusal, and what the store was asked for it."""
    answers = []

    def ask() -> None:
        with pytest.raises(grpc.RpcError) as caught:
            ABOUT[rpc](house.stubs["both"], ref)
        answers.append(answer_of(caught.value))

    calls = house.calls_of(ask)
    return answers[0], calls


@pairwise(
    rpc=list(ABOUT),
    by=["name", "version", "digest"],
    where=["in the store", "resident", "in use"],
)
def test_what_another_tenant_has_is_as_if_it_were_not_there(
    house: TableHouse, rpc: str, by: str, where: str
) -> None:
    name, folder = house.fresh(OTHER), house.make()
    refs = {"name": name, "version": f"{name}@1", "digest": open_checkpoint(folder).digest}
    ref = refs[by]
    absent = refusal(house, rpc, ref)
    assert absent[0][0] is grpc.StatusCode.NOT_FOUND
    assert absent[1] == {("GetAdapter", "NOT_FOUND"): 1}
    house.register(name, folder)
    if where != "in the store":
        load(house.stubs["neighbour"], name)
    if where == "in use":
        generate(house.stubs["neighbour"], ref)
    for _ in range(2):
        assert refusal(house, rpc, ref) == absent
    # No refusal has loaded it either.
    is_resident = refs["digest"] in residents(house.stubs["root"])
    assert is_resident == (where != "in the store")
    # Of the caller's own tenant, what is not there is answered the same way.
    own = f"{OWN}/{name.partition('/')[2]}"
    if by == "name":
        mine = refusal(house, rpc, own)
        assert str(mine).replace(own, name) == str(absent)
    assert generate(house.stubs["neighbour"], ref)
    if where == "in use":
        house.register(own, folder)
        ABOUT[rpc](house.stubs["both"], refs["digest"])


def test_an_unqualified_name_means_the_home_tenant(house: TableHouse) -> None:
    assert generate(house.stubs["both"], "kept")[-1].adapter.digest == house.digests[OWN]
    assert generate(house.stubs["neighbour"], "kept")[-1].adapter.digest == house.digests[OTHER]
    load(house.stubs["operator"], "kept@1")
    with pytest.raises(grpc.RpcError) as caught:
        generate(house.stubs["root"], "kept")  # its home is "default"
    assert caught.value.details() == "no adapter default/kept"


# --- what tenants share without knowing ---------------------------------------------------------

LONG = "a prompt that fills several pages of keys and values " * 2


def cached_tokens(stub: Any, adapter: str, **fields: Any) -> int:
    return int(generate(stub, adapter, text=LONG, **fields)[-1].usage.cached_prompt_tokens)


def test_prefixes_of_one_content_are_not_shared_between_tenants(house: TableHouse) -> None:
    name, folder = house.fresh(), house.make()
    digests = {house.register(f"{tenant}/{name}", folder) for tenant in (OWN, OTHER)}
    assert len(digests) == 1
    ours, theirs = house.stubs["both"], house.stubs["neighbour"]
    for adapter in (name, digests.pop()):
        cached_tokens(ours, adapter)
        assert cached_tokens(house.stubs["caller"], adapter) > 0
    assert cached_tokens(theirs, name) == 0
    assert cached_tokens(theirs, name) > 0
    assert cached_tokens(theirs, name, cache_salt="x") == 0


def test_prefixes_of_the_base_model_are_not_shared_between_tenants(house: TableHouse) -> None:
    assert cached_tokens(house.stubs["caller"], "") == 0
    assert cached_tokens(house.stubs["both"], "") > 0
    assert cached_tokens(house.stubs["neighbour"], "") == 0
    assert cached_tokens(house.stubs["root"], "") == 0


def test_a_content_of_two_tenants_shows_each_its_own_names(house: TableHouse) -> None:
    name, folder = house.fresh(), house.make()
    digest = house.register(f"{OWN}/{name}", folder)
    house.register(f"{OTHER}/{name}", folder)
    load(house.stubs["both"], name)
    load(house.stubs["neighbour"], name)
    assert list(residents(house.stubs["both"])[digest].names) == [f"{OWN}/{name}"]
    assert list(residents(house.stubs["neighbour"])[digest].names) == [f"{OTHER}/{name}"]
    assert len(residents(house.stubs["root"])[digest].names) == 2


def test_what_is_gone_from_the_store_can_be_unloaded_by_its_owner(house: TableHouse) -> None:
    name = house.fresh(OWN)
    digest = house.register(name, house.make())
    load(house.stubs["operator"], name)
    house.root.stub.DeleteAdapter(store_pb.DeleteAdapterRequest(name=name))
    for stub, is_owner in ((house.stubs["neighbour"], False), (house.stubs["operator"], True)):
        assert (digest in residents(stub)) == is_owner
        if is_owner:
            unload(stub, digest)
        else:
            with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
                unload(stub, digest)
    assert digest not in residents(house.stubs["root"])


@pytest.mark.parametrize("rpc", ALLOWED)
@pytest.mark.parametrize("caller", ["nobody", "stranger"])
def test_without_a_token_nothing_of_a_call_is_read(
    house: TableHouse, rpc: str, caller: str
) -> None:
    """The caller sends nothing at all, and is answered."""
    never = threading.Event()

    def requests() -> Iterator[bytes]:
        never.wait()
        yield b""

    token = CALLERS[caller]
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(house.inference.server.address) as channel:
        call = channel.stream_stream(f"/{SERVICE.full_name}/{rpc}")(
            requests(), timeout=60, metadata=metadata
        )
        try:
            assert call.code() is grpc.StatusCode.UNAUTHENTICATED
        finally:
            never.set()


# --- beside the contract ------------------------------------------------------------------------


@pytest.mark.parametrize("caller", CALLERS)
def test_health_is_told_to_all_and_the_contract_to_who_has_a_token(
    house: TableHouse, caller: str
) -> None:
    token = CALLERS[caller]
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(house.inference.server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = reflection.ServerReflectionInfo(iter([request]), metadata=metadata, timeout=60)
        if caller in ("nobody", "stranger"):
            with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                next(answers)
        else:
            services = next(answers).list_services_response.service
            assert SERVICE.full_name in {service.name for service in services}
