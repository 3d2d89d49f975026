"""Finds a model by its name on the Hugging Face Hub, such as Qwen/Qwen3-0.6B, or NAME@REVISION: in
the hub's cache folder, or by a download into it.

The hub's library decides where cache, server and token are, by its own variables: HF_HOME and
HF_HUB_CACHE, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE. Where the hub may send it besides, says
LOADOUT_HF_REDIRECT_HOSTS.
"""

from __future__ import annotations

import re
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inference_svc.config import InferenceSettings, split_hub_name
from inference_svc.errors import UnsupportedModel
from inference_svc.model.checkpoint.embedding_files import (
    DENSE,
    INPUTS,
    MODULES,
    POOLING,
    PROMPTS,
)
from inference_svc.model.checkpoint.files import (
    CONFIG,
    INDEX,
    TOKENIZER,
    TOKENIZER_CONFIG,
    VOCABULARIES,
    check_tokenizer,
    has_vocabulary,
    is_gguf,
    missing_files,
    weight_files,
)
from inference_svc.model.checkpoint.generation_config import FILE_NAME as GENERATION_CONFIG
from inference_svc.pictures.processor import PREPROCESSOR, PROCESSOR
from servicekit.errors import InvalidSetting
from servicekit.hub_client import REDIRECT_HOSTS, ForeignHost, HubHosts
from servicekit.telemetry.redact import redact

REDIRECT_HOSTS_VARIABLE = "LOADOUT_HF_REDIRECT_HOSTS"
SMALL_FILES = (
    *(CONFIG, GENERATION_CONFIG, INDEX, *VOCABULARIES, TOKENIZER_CONFIG),
    *("merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", PREPROCESSOR, PROCESSOR),
    *(MODULES, PROMPTS, *INPUTS, POOLING, *DENSE),
)
"""The files of a model that are downloaded before its weights, as far as it has them."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


def find_model(settings: InferenceSettings) -> InferenceSettings:
    """Returns the settings with the model's folder in place of its name on the hub. Uses no
    network; raises InvalidSetting with the command that downloads it."""
    if settings.model.is_dir() or is_gguf(settings.model):
        return settings
    name = settings.model.as_posix()
    folder = cached_folder(name)
    if folder is None:
        raise InvalidSetting(
            f"no folder {name} here, and it is not complete in the hub's cache, {_cache_dir()}; "
            f"to download it: loadout download {name}"
        )
    return settings.model_copy(update={"model": folder})


def cached_folder(name: str) -> Path | None:
    """Returns the folder of a model in the hub's cache, None unless everything is there that is
    served."""
    repo, revision = split_hub_name(name)
    with _explained(name):
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(repo, CONFIG, revision=revision)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    return None if missing_files(folder) else folder


def download(
    name: str,
    say: Callable[[str], None],
    *,
    or_folder: bool = False,
    redirect_hosts: Iterable[str] = REDIRECT_HOSTS,
) -> Path:
    """Returns the folder of a model of the hub, after downloading the served files that are not in
    the hub's cache; `say` gets a line about it. Besides its own host the hub may send the download
    to the `redirect_hosts`.

    Raises UnsupportedModel for a model that is not served, before its weights are downloaded, and
    InvalidSetting with the command to run where it cannot be downloaded. `or_folder`: the name was
    looked for as a folder's first, and InvalidSetting says so.
    """
    try:
        split_hub_name(name)
    except ValueError as error:
        raise InvalidSetting(str(error)) from None
    try:
        return cached_folder(name) or _download(name, say, redirect_hosts)
    except InvalidSetting as error:
        if or_folder:
            raise InvalidSetting(f"no folder {name} here, and {error}") from error
        raise


def _download(name: str, say: Callable[[str], None], redirect_hosts: Iterable[str]) -> Path:
    with _explained(name):
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            raise InvalidSetting(
                f"{name} is not complete in the hub's cache, {_cache_dir()}, and HF_HUB_OFFLINE is "
                f"set; to download it: HF_HUB_OFFLINE=0 loadout download {name}"
            )
        say(f"downloading {name} from {redact(constants.ENDPOINT)} into {_cache_dir()}")
        hosts = HubHosts(constants.ENDPOINT, redirect_hosts)
    with hosts.in_use():
        return _fetch(name)


def _fetch(name: str) -> Path:
    """Downloads the served files of a model, its weights last."""
    repo, revision = split_hub_name(name)
    with _explained(name):
        from huggingface_hub import snapshot_download

        commit, on_the_hub = _find_commit(repo, revision)
        bars = _bars(are_shown=False)
        folder = Path(
            snapshot_download(
                repo, revision=commit, allow_patterns=list(SMALL_FILES), tqdm_class=bars
            )
        )
    _check_small_files(name, folder)
    weights = [path.name for path in weight_files(folder)]
    for missing in sorted(set(weights) - on_the_hub):  # before gigabytes of the others
        raise _incomplete(name, missing)
    with _explained(name):
        bars = _bars(are_shown=sys.stderr.isatty())
        snapshot_download(repo, revision=commit, allow_patterns=weights, tqdm_class=bars)
    for missing in missing_files(folder):
        raise _incomplete(name, missing)
    _write_ref(repo, revision or "main", commit)
    return folder


def _find_commit(repo: str, revision: str | None) -> tuple[str, frozenset[str]]:
    """Returns the commit of a revision, of the model's newest without one, and the names of its
    files. The hub's library makes paths of the commit, without a check of the server's value.
    Raises ValueError, and errors of the library."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(repo, revision=revision)
    commit, files = info.sha, info.siblings or ()
    if not _COMMIT.fullmatch(commit or ""):
        raise ValueError(f"the server names no commit: {str(commit)[:80]!r}")
    return str(commit), frozenset(file.rfilename for file in files)


def _write_ref(repo: str, revision: str, commit: str) -> None:
    """Names the commit of a revision in the hub's cache, as the hub's library does for a download
    without a commit. At once: servers that share the cache read it meanwhile."""
    ref = Path(_cache_dir()) / f"models--{repo.replace('/', '--')}" / "refs" / revision
    if revision != commit and not (ref.is_file() and ref.read_text() == commit):
        ref.parent.mkdir(parents=True, exist_ok=True)
        partial = ref.with_name(uuid.uuid4().hex)
        partial.write_text(commit)
        partial.replace(ref)


def _check_small_files(name: str, folder: Path) -> None:
    """Raises UnsupportedModel if the model is not served by facts that show without its weights."""
    # Imports torch, which a start of the service does after its settings are known to be good.
    from inference_svc.model.architectures import load_description

    if not (folder / CONFIG).is_file():
        raise UnsupportedModel(f"{name} has no {CONFIG} on the hub: it is no model of transformers")
    if not has_vocabulary(folder):
        raise _incomplete(name, TOKENIZER)
    try:
        load_description(folder)
        check_tokenizer(folder)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name}: {error}") from error


def _incomplete(name: str, missing: str) -> UnsupportedModel:
    return UnsupportedModel(f"{name} has no {missing} on the hub, and cannot be served without")


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
    """Raises InvalidSetting for errors of the hub's library, also any that the answers of a server
    cause that is no hub."""
    try:
        from huggingface_hub import constants, errors
    except ImportError:
        raise InvalidSetting(
            f"{name}: for models by name install the hub's library: pip install huggingface_hub"
        ) from None
    except ValueError as error:
        raise InvalidSetting(
            f"{name}: the hub's library refuses its environment variables, such as HF_ENDPOINT "
            f"({redact(str(error))}); correct them, then run: loadout download {name}"
        ) from error
    endpoint = redact(constants.ENDPOINT)
    # The base class of the errors of the HTTP library underneath, whichever that is.
    transport_error: type[Exception] = errors.HfHubHTTPError.__bases__[0]
    # Errors of the hub's library are OSErrors, too.
    of_the_hub = (transport_error, errors.EntryNotFoundError, errors.HFValidationError)
    try:
        yield
    except ForeignHost as error:
        raise InvalidSetting(
            f"{name} cannot be downloaded from {endpoint}: {error}; if you trust that host, set "
            f"{REDIRECT_HOSTS_VARIABLE} to a list with it (default: {','.join(REDIRECT_HOSTS)})"
        ) from error
    except errors.GatedRepoError as error:
        raise InvalidSetting(
            f"{name} is gated: ask for access at {endpoint}/{split_hub_name(name)[0]}, "
            "then run: "
            "hf auth login"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InvalidSetting(
            f"{name}: the model has no such commit, tag or branch at {endpoint}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise InvalidSetting(
            f"there is no model {name} at {endpoint}, or it is private; for a private "
            "one run: hf auth login"
        ) from error
    except Exception as error:
        is_ours = isinstance(error, InvalidSetting | UnsupportedModel | OSError)
        if is_ours and not isinstance(error, of_the_hub):
            raise
        cause = error.__cause__ or error
        reason = redact(f"{type(cause).__name__}: {cause}".partition("\n")[0])
        raise InvalidSetting(
            f"{name} cannot be downloaded from {endpoint} now ({reason}); to try again: "
            f"loadout download {name}"
        ) from error
