"""Where `loadout top` reads the metrics of a replica."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import pytest

from loadout.cli.server.top import MetricsPlace
from loadout.errors import LoadoutError, StreamLost, Unavailable
from loadout.types import ServerInfo
from tests.support.loadout.server_info import SERVER


def answered(server: ServerInfo | LoadoutError) -> Future[ServerInfo | LoadoutError]:
    future: Future[ServerInfo | LoadoutError] = Future()
    future.set_result(server)
    return future


def test_metrics_are_where_the_server_says() -> None:
    place = MetricsPlace("[::1]:7180", None)
    assert place.address(answered(replace(SERVER, metrics_port=7181))) == "[::1]:7181"
    assert place.address(answered(StreamLost("gone"))) == "[::1]:7181", "known by now"


def test_metrics_are_where_the_user_says() -> None:
    given = MetricsPlace("inference:7080", "10.0.0.1:9000")
    assert given.address(Future()) == "10.0.0.1:9000", "without waiting for the server"


@pytest.mark.parametrize("replica", ["inference:7080", "inference", "dns:///inference:7080"])
def test_metrics_are_asked_for_where_nothing_says(replica: str) -> None:
    port = 0 if replica == "inference:7080" else 7081
    with pytest.raises(Unavailable, match=f"{replica} does not say .* name --inference-metrics"):
        MetricsPlace(replica, None).address(answered(replace(SERVER, metrics_port=port)))


def test_server_that_does_not_answer_is_the_error_of_its_metrics() -> None:
    with pytest.raises(StreamLost, match="gone"):
        MetricsPlace("inference:7080", None).address(answered(StreamLost("gone")))
