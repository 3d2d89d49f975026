"""Same name, new content: nothing of one version is ever taken for another's."""

from __future__ import annotations

import shutil

from loadout import errors, types
from tests.support.wait import until
from tests.system.services import Services

GREEDY = {"temperature": 0.0, "ignore_eos": True}
PROMPT = [ord(char) for char in "one shared prompt, longer than two pages of tokens"]


def put(services: Services, name: str, adapter: str) -> str:
    """Makes the folder that `name` is registered from hold the zoo's `adapter`."""
    folder = services.sources / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(services.zoo.adapter_dirs[adapter], folder)
    return f"file://{folder}"


def complete(services: Services, adapter: str, **options: object) -> types.Completion:
    return services.client.complete(PROMPT, adapter=adapter, max_tokens=8, **GREEDY, **options)


def test_requests_in_flight_finish_on_the_old_digest(services: Services) -> None:
    client = services.client
    old = client.register("moving", put(services, "moving", "r16"))
    running = iter(client.generate(PROMPT, adapter="moving", max_tokens=200, **GREEDY))
    first = next(running)
    new = client.register("moving", put(services, "moving", "r3"))
    assert new.adapter.version == 2
    assert new.revision > old.revision
    after = complete(services, "moving", min_revision=new.revision)
    assert after.adapter == types.AdapterIdentity("default/moving@2", new.adapter.digest)
    assert list(after.token_ids) == services.zoo.greedy("r3", PROMPT, 8, guess=after.token_ids)

    tokens = [*first.token_ids, *(token for chunk in running for token in chunk.token_ids)]
    assert first.adapter.digest == old.adapter.digest
    assert tokens == services.zoo.greedy("r16", PROMPT, 200, guess=tokens)


def test_no_prefix_is_reused_across_versions(services: Services) -> None:
    client = services.client
    client.register("renewed", put(services, "renewed", "r8"))
    salted = {"cache_salt": "versions"}
    assert complete(services, "renewed", **salted).usage.cached_prompt_tokens == 0
    assert complete(services, "renewed", **salted).usage.cached_prompt_tokens == 48
    new = client.register("renewed", put(services, "renewed", "r33"))
    changed = complete(services, "renewed", min_revision=new.revision, **salted)
    assert changed.usage.cached_prompt_tokens == 0
    assert list(changed.token_ids) == services.zoo.greedy("r33", PROMPT, 8, guess=changed.token_ids)


def test_a_prompt_has_keys_and_values_of_its_own_for_each_adapter(services: Services) -> None:
    """LMCache/LMCache#2961, vllm#44250: of two adapters, the base model and a new version, one
    after the other and again."""
    client = services.client
    for name, folder in (("kept", "r16"), ("other", "r3")):
        client.register(name, put(services, name, folder))
    client.register("kept", put(services, "kept", "r8"))
    asked = {"kept@1": "r16", "other": "r3", "": "", "kept@2": "r8"}
    for cached in (0, 48):
        for adapter, folder in asked.items():
            done = complete(services, adapter, cache_salt="adapters")
            assert done.usage.cached_prompt_tokens == cached
            assert list(done.token_ids) == services.zoo.greedy(
                folder, PROMPT, 8, guess=done.token_ids
            )


def test_no_prefix_is_reused_across_tenants_or_salts(services: Services) -> None:
    client = services.client
    for tenant in ("red", "blue"):
        found = client.register(f"{tenant}/same", put(services, "same", "r64"))
    assert found.adapter.version == 1
    salts = {"cache_salt": "tenants"}
    assert complete(services, "red/same", **salts).usage.cached_prompt_tokens == 0
    assert complete(services, "red/same", **salts).usage.cached_prompt_tokens == 48
    assert complete(services, "blue/same", **salts).usage.cached_prompt_tokens == 0
    other = complete(services, "red/same", cache_salt="another")
    assert other.usage.cached_prompt_tokens == 0


def test_an_old_version_comes_back(services: Services) -> None:
    """Registering an old digest points the name back to its version."""
    client = services.client
    first = client.register("undone", put(services, "undone", "r1"))
    client.register("undone", put(services, "undone", "r3"))
    back = client.register("undone", put(services, "undone", "r1"))
    assert back.adapter.version == 1
    assert back.adapter.digest == first.adapter.digest
    done = complete(services, "undone", min_revision=back.revision)
    assert done.adapter.name == "default/undone@1"
    assert list(done.token_ids) == services.zoo.greedy("r1", PROMPT, 8, guess=done.token_ids)


def test_names_follow_the_watch(services: Services) -> None:
    """Without min_revision, a name is stale only until the watch has sent its event."""
    client = services.client
    client.register("watched", put(services, "watched", "r1"))
    complete(services, "watched")
    new = client.register("watched", put(services, "watched", "r3"))
    until(lambda: complete(services, "watched").adapter.digest == new.adapter.digest)


def is_gone(services: Services, adapter: str) -> bool:
    try:
        complete(services, adapter)
    except errors.NotFound:
        return True
    return False


def test_deleted_is_gone_for_new_requests_and_stays_for_running(services: Services) -> None:
    client = services.client
    client.register("leaving", put(services, "leaving", "r16"))
    running = iter(client.generate(PROMPT, adapter="leaving", max_tokens=200, **GREEDY))
    first = next(running)
    client.delete("leaving")
    until(lambda: is_gone(services, "leaving"), what="it still resolves")
    tokens = [*first.token_ids, *(token for chunk in running for token in chunk.token_ids)]
    assert tokens == services.zoo.greedy("r16", PROMPT, 200, guess=tokens)
