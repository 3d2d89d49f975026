"""Finds a model by its name on the Hugging Face Hub, such as Qwen/Qwen3-0.6B: in the hub's cache
folder, or by a download into it.

The hub's library decides where cache, server and token are, by its own variables: HF_HOME and
HF_HUB_CACHE, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inference_svc.config import HUB_NAME, NO_MODEL, InferenceSettings
from inference_svc.errors import UnsupportedModel
from inference_svc.model.architectures import find_architecture
from inference_svc.model.files import CONFIG, INDEX, missing_files, read_json, weight_files
from inference_svc.model.generation_config import FILE_NAME as GENERATION_CONFIG
from servicekit.errors import InvalidSetting

SMALL_FILES = (
    *(CONFIG, GENERATION_CONFIG, INDEX),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
"""What is downloaded of a model before its weights, as far as it has them."""


def find_model(settings: InferenceSettings) -> InferenceSettings:
    """Returns the settings with the model's folder in place of its name on the hub. Uses no
    network; raises InvalidSetting with the command that downloads it."""
    if settings.model.is_dir():
        return settings
    name = settings.model.as_posix()
    folder = cached_folder(name)
    if folder is None:
        raise InvalidSetting(
            f"{name} is no folder here, and it is not complete in the hub's cache, "
            f"{_cache_dir()}; to download it: loadout download {name}"
        )
    return settings.model_copy(update={"model": folder})


def cached_folder(name: str) -> Path | None:
    """Returns the folder of a model in the hub's cache, None unless everything is there that is
    served."""
    with _explained(name):
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(name, CONFIG)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    return None if missing_files(folder) else folder


def download(name: str, say: Callable[[str], None]) -> Path:
    """Returns the folder of a model of the hub, after downloading what of it is served and not in
    the hub's cache; `say` gets a line that tells of it.

    Raises UnsupportedModel for a model that is not served, before its weights are downloaded, and
    InvalidSetting with the command to run where it cannot be downloaded.
    """
    if not HUB_NAME.fullmatch(name):
        raise InvalidSetting(NO_MODEL.format(name))
    folder = cached_folder(name)
    if folder is not None:
        return folder
    with _explained(name):
        from huggingface_hub import constants, snapshot_download

        if constants.HF_HUB_OFFLINE:
            raise InvalidSetting(
                f"{name} is not complete in the hub's cache, {_cache_dir()}, and HF_HUB_OFFLINE is "
                f"set; to download it: HF_HUB_OFFLINE=0 loadout download {name}"
            )
        say(f"downloading {name} from {constants.ENDPOINT} into {_cache_dir()}")
        bars = _bars(are_shown=False)
        folder = Path(snapshot_download(name, allow_patterns=list(SMALL_FILES), tqdm_class=bars))
        _check_config(name, folder)
        weights = [path.name for path in weight_files(folder)]
        bars = _bars(are_shown=sys.stderr.isatty())
        snapshot_download(name, revision=folder.name, allow_patterns=weights, tqdm_class=bars)
    for missing in missing_files(folder):
        raise UnsupportedModel(f"{name} has no {missing} on the hub, and cannot be served without")
    return folder


def _check_config(name: str, folder: Path) -> None:
    if not (folder / CONFIG).is_file():
        raise UnsupportedModel(f"{name} has no {CONFIG} on the hub: it is no model of transformers")
    try:
        find_architecture(read_json(folder / CONFIG))
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name}: {error}") from error


def _bars(*, are_shown: bool) -> type[Any]:
    """Returns the class of the progress bars: without a terminal they would fill a log."""
    from huggingface_hub.utils import tqdm

    class Bars(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **(options if are_shown else options | {"disable": True}))

    return Bars


def _cache_dir() -> str:
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Raises InvalidSetting for what the hub's library raises."""
    try:
        from huggingface_hub import constants, errors
    except ImportError:
        raise InvalidSetting(
            f"{name}: for models by name install the hub's library: pip install huggingface_hub"
        ) from None
    # The base class of the errors of the HTTP library underneath, whichever that is.
    transport_error: type[Exception] = errors.HfHubHTTPError.__bases__[0]
    try:
        yield
    except errors.GatedRepoError as error:
        raise InvalidSetting(
            f"{name} is gated: ask for access at {constants.ENDPOINT}/{name}, then run: "
            "hf auth login"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise InvalidSetting(
            f"there is no model {name} at {constants.ENDPOINT}, or it is private; for a private "
            "one run: hf auth login"
        ) from error
    except (transport_error, errors.EntryNotFoundError, errors.HFValidationError) as error:
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {cause}".partition("\n")[0]
        raise InvalidSetting(
            f"{name} cannot be downloaded from {constants.ENDPOINT} now ({reason}); to try again: "
            f"loadout download {name}"
        ) from error
