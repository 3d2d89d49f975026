"""The store's client for an engine in a process of its own, made there from the settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inference_svc.config import InferenceSettings
from inference_svc.engine.process_main import ChildStore
from inference_svc.log import configure_logging
from inference_svc.store.client import ImageClient, NoStore
from inference_svc.store.credentials import StoreAccess, read_store_access
from inference_svc.store.replicas import Replicas


class RemoteImages(ImageClient):
    """With replicas of its own, which share what they learn with those beside the front."""

    def __init__(self, replicas: Replicas, access: StoreAccess, say: Callable[[Any], None]) -> None:
        super().__init__(replicas, access)
        replicas.share(say)
        self.hear = replicas.hear


class RemoteNoStore(NoStore):
    def hear(self, news: Any) -> None:
        raise AssertionError("there are no replicas to speak of")


@dataclass(frozen=True, slots=True)
class ImageClientRecipe:
    """Pickles; see `engine.child.StoreRecipe`. Configures the log as well."""

    config: InferenceSettings

    def __call__(self, say: Callable[[Any], None]) -> ChildStore:
        configure_logging(self.config.log_format, self.config.log_level)
        if not self.config.store:
            return RemoteNoStore()
        replicas = Replicas.at(*self.config.store_addresses)
        return RemoteImages(replicas, read_store_access(self.config), say)
