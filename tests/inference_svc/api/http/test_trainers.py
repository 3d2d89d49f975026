"""What trainers ask for beside generation."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference_svc.api.http.trainers import WEIGHT_ROUTES
from tests.support.access.policies import token_lines, token_of, write_policy
from tests.support.inference.front import Front
from tests.support.inference.serving import LAYOUT, MAX_MODEL_LEN
from tests.support.wait import until_async


def test_facts_by_vllms_names(serve_http) -> None:
    async def body(front: Front) -> None:
        await until_async(lambda: bool(front.engine.layout_ids))
        found = (await front.raw.get("/server_info?config_format=json")).json()
        config = found["vllm_config"]
        model = config["model_config"]
        assert (model["dtype"], model["max_model_len"]) == ("torch.float32", MAX_MODEL_LEN)
        assert model["served_model_name"] == ["base", "b"]
        assert config["parallel_config"]["data_parallel_size"] == 1
        assert config["lora_config"] == {"max_loras": 4, "max_lora_rank": 16}
        assert config["scheduler_config"]["max_num_seqs"] == 8
        assert config["weight_transfer_config"] is None
        assert found["loadout"]["versions"] == {"loadout": "0"}
        assert found["loadout"]["layout_id"] == LAYOUT
        assert (await front.raw.get("/server_info")).json() == found
        assert (await front.raw.get("/get_world_size")).json() == {"world_size": 1}
        first = (await front.raw.get("/v1/models")).json()["data"][0]
        assert (first["id"], first["max_model_len"]) == ("base", MAX_MODEL_LEN)
        refused = await front.raw.get("/server_info?config_format=text")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "config_format")

    serve_http(body, store=True)


def test_without_a_store_there_are_no_adapters(serve_http) -> None:
    async def body(front: Front) -> None:
        found = (await front.raw.get("/server_info")).json()
        assert found["vllm_config"]["lora_config"] is None

    serve_http(body)


def test_prefix_cache_is_reset(serve_http) -> None:
    async def body(front: Front) -> None:
        answer = await front.raw.post("/reset_prefix_cache")
        assert (answer.status_code, answer.json()) == (200, {"success": True})
        assert front.engine.num_resets == 1

    serve_http(body)


@pytest.mark.parametrize("path", WEIGHT_ROUTES)
def test_full_weights_are_refused_with_what_to_do(serve_http, path: str) -> None:
    async def body(front: Front) -> None:
        answer = await front.post(path, {"update_info": {}})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (501, "not_implemented")
        assert "push it" in error["message"]

    serve_http(body)


def test_roles(serve_http, tmp_path: Path) -> None:
    policy = write_policy(
        tmp_path,
        token_lines("caller", ["caller"]),
        token_lines("operator", ["operator"], ["team-a"]),
        token_lines("root", ["operator"], ["*"]),
    )
    expected = {
        ("GET", "/server_info"): {"": 401, "caller": 200, "operator": 200, "root": 200},
        ("GET", "/get_world_size"): {"": 401, "caller": 200, "operator": 200, "root": 200},
        ("POST", "/reset_prefix_cache"): {"": 401, "caller": 403, "operator": 403, "root": 200},
        ("POST", "/update_weights"): {"": 401, "caller": 403, "operator": 501, "root": 501},
    }

    async def body(front: Front) -> None:
        for (method, path), statuses in expected.items():
            for name, status in statuses.items():
                headers = {"authorization": f"Bearer {token_of(name)}"} if name else {}
                answer = await front.raw.request(method, path, headers=headers)
                assert answer.status_code == status, (path, name)

    serve_http(body, policy_file=policy)
