"""Adapter folders: which files go, in which pieces, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from contract.adapter_files import MAX_CONFIG_BYTES, MAX_FILES, MAX_HEADER_BYTES, TEXT_FILES
from contract.folders import FileChanged, FileMissing, LinkFound
from loadout import upload as upload_module
from loadout._rpc.calls import NewAdapter, upload_meta
from loadout.errors import InvalidArgument
from loadout.upload import (
    CHUNK_BYTES,
    Upload,
    find_adapters,
    is_uri,
    open_folder,
)
from tests.support.servers.hub_cache import linked

WEIGHTS = (2).to_bytes(8, "little") + b"{}"


def upload(folder, progress=None, if_current_digest=""):
    new = NewAdapter("a", "b", "", if_current_digest, pinned=True, labels={"k": "v"})
    return Upload(open_folder(folder), progress, upload_meta(new, ephemeral=False))


def test_meta_then_files_in_order(adapter_folder):
    meta, *rest = upload(adapter_folder).messages()
    assert (meta.meta.name, meta.meta.base_model, meta.meta.pinned) == ("a", "b", True)
    assert dict(meta.meta.labels) == {"k": "v"}
    files: dict[str, bytes] = {}
    for message in rest:
        before = files.get(message.chunk.file_name, b"")
        assert message.chunk.offset == len(before)
        assert len(message.chunk.data) <= CHUNK_BYTES
        files[message.chunk.file_name] = before + message.chunk.data
    assert list(files) == ["adapter_config.json", "adapter_model.safetensors"]
    assert all((adapter_folder / name).read_bytes() == data for name, data in files.items())
    assert len(rest) == 1 + 3


def test_progress_ends_at_the_total(adapter_folder):
    seen = []
    list(upload(adapter_folder, lambda sent, total: seen.append((sent, total))).messages())
    total = sum(
        (adapter_folder / n).stat().st_size
        for n in ("adapter_config.json", "adapter_model.safetensors")
    )
    assert [sent for sent, _ in seen] == sorted(sent for sent, _ in seen)
    assert seen[-1] == (total, total)


def test_shards_and_index(adapter_folder):
    (adapter_folder / "adapter_model.safetensors").unlink()
    shards = [f"adapter_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name in [*shards, "adapter_model.safetensors.index.json", "adapter_model.bin"]:
        (adapter_folder / name).write_bytes(WEIGHTS)
    names = list(open_folder(adapter_folder).files)
    assert names == ["adapter_config.json", *shards, "adapter_model.safetensors.index.json"]


def test_empty_file_still_arrives(adapter_folder):
    (adapter_folder / "adapter_config.json").write_bytes(b"")
    assert next(open_folder(adapter_folder).pieces()) == ("adapter_config.json", 0, b"")


def test_exact_multiple_of_a_chunk_has_no_empty_tail(adapter_folder):
    weights = WEIGHTS.ljust(2 * CHUNK_BYTES)
    (adapter_folder / "adapter_model.safetensors").write_bytes(weights)
    sizes = [len(data) for _, _, data in open_folder(adapter_folder).pieces()]
    assert sizes[1:] == [CHUNK_BYTES] * 2


def test_sent_again_from_the_beginning(adapter_folder):
    again = upload(adapter_folder)
    assert list(again.messages()) == list(again.messages())


def test_conditional_upload_is_not_repeatable(adapter_folder):
    assert upload(adapter_folder).repeatable
    assert not upload(adapter_folder, if_current_digest="sha256:00").repeatable


def gone(path):
    path.unlink()


def link(path):
    path.unlink()
    path.symlink_to("/etc/hostname")


def another(path):
    path.rename(path.with_name("before"))
    path.write_bytes(path.with_name("before").read_bytes())


def longer(path):
    with path.open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (gone, FileMissing, "is missing"),
        (link, LinkFound, "is a link"),
        (another, FileChanged, "changed while it was read: try again"),
        (longer, FileChanged, "changed while it was read: try again"),
    ],
)
def test_a_file_that_is_not_what_it_was_is_not_sent(adapter_folder, change, kind, words):
    weights = "adapter_model.safetensors"
    broken = upload(adapter_folder)
    change(adapter_folder / weights)
    sent = []
    with pytest.raises(kind, match=f"{weights} {words}") as caught:
        sent.extend(broken.messages())
    assert broken.failure is caught.value
    assert {each.chunk.file_name for each in sent[1:]} == {"adapter_config.json"}


def test_a_file_that_grows_while_it_is_sent_ends(adapter_folder):
    weights = adapter_folder / "adapter_model.safetensors"
    growing = upload(adapter_folder, lambda sent, total: sent > CHUNK_BYTES and longer(weights))
    size, sent = weights.stat().st_size, 0
    with pytest.raises(FileChanged, match="changed while it was read"):  # noqa: PT012
        for each in growing.messages():
            sent += len(each.chunk.data)
    assert sent == size + (adapter_folder / "adapter_config.json").stat().st_size


def test_links_of_a_hubs_cache_are_sent_as_what_they_stand_for(adapter_folder, tmp_path):
    expected = list(upload(adapter_folder).messages())
    assert list(upload(linked(adapter_folder, tmp_path / "cache")).messages()) == expected


@pytest.mark.parametrize(
    ("name", "make", "words"),
    [
        ("chat_template.jinja", lambda path: path.symlink_to("/etc/hostname"), "is a link"),
        ("tokenizer.json", os.mkfifo, "is a pipe"),
        ("special_tokens_map.json", Path.mkdir, "is a folder"),
        (
            "adapter_model-00001-of-00002.safetensors",
            lambda path: path.write_bytes(WEIGHTS[:-1]),
            "does not begin like a .safetensors file of this size",
        ),
        ("adapter_model.safetensors.\n", Path.touch, "has a name that the store does not accept"),
        (
            "adapter_model-00001-of-00001.safetensors",
            lambda path: (path.write_bytes(WEIGHTS), os.truncate(path, 1 << 40)),
            "has 1099511627776 bytes, more than any adapter has",
        ),
    ],
)
@pytest.mark.timeout(60)
def test_a_hostile_file_is_refused_by_name(adapter_folder, name, make, words):
    make(adapter_folder / name)
    with pytest.raises(InvalidArgument) as caught:
        open_folder(adapter_folder)
    path = str(adapter_folder / name)
    shown = path if path.isprintable() else ascii(path)
    assert caught.value.message.startswith(f"{shown} ")
    assert words in caught.value.message
    assert caught.value.subject == shown


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", *TEXT_FILES])
def test_a_git_lfs_pointer_is_refused_before_it_is_sent(adapter_folder, name):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4a\nsize 13648432\n"
    (adapter_folder / name).write_text(pointer)
    with pytest.raises(InvalidArgument, match=r"is a Git LFS pointer.*`git lfs pull`") as caught:
        open_folder(adapter_folder)
    assert caught.value.subject == str(adapter_folder / name)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("adapter_config.json", MAX_CONFIG_BYTES),
        ("adapter_model.safetensors.index.json", MAX_HEADER_BYTES),
        *TEXT_FILES.items(),
    ],
)
def test_small_files_have_limits(adapter_folder, name, limit):
    (adapter_folder / name).touch()
    os.truncate(adapter_folder / name, limit)
    assert name in open_folder(adapter_folder).files
    os.truncate(adapter_folder / name, limit + 1)
    with pytest.raises(InvalidArgument, match=f"{name} has more than {limit} bytes"):
        open_folder(adapter_folder)


def test_an_adapter_has_so_many_files(adapter_folder):
    for number in range(MAX_FILES - 1):  # the config is one
        (adapter_folder / f"adapter_model-{number:05}-of-00300.safetensors").write_bytes(WEIGHTS)
    with pytest.raises(InvalidArgument, match=f"has {MAX_FILES + 1} files of an adapter"):
        open_folder(adapter_folder)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("adapter_config.json", "adapter_config.json does not exist"),
        ("adapter_model.safetensors", "has no adapter_model.safetensors"),
    ],
)
def test_not_an_adapter(adapter_folder, missing, message):
    (adapter_folder / missing).unlink()
    with pytest.raises(InvalidArgument, match=message):
        open_folder(adapter_folder)


def test_not_a_directory(tmp_path):
    with pytest.raises(InvalidArgument, match="nowhere is not a directory") as caught:
        open_folder(tmp_path / "nowhere")
    assert caught.value.subject == str(tmp_path / "nowhere")


def test_uri_or_path(tmp_path):
    assert is_uri("s3://bucket/prefix")
    assert is_uri("file:///a")
    assert not is_uri("./adapter")
    assert not is_uri(tmp_path)


def below(folder, *names):
    """Makes adapters in folders below."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "adapter_config.json").write_text("{}")


def refusal(folder) -> str:
    with pytest.raises(InvalidArgument) as caught:
        open_folder(folder, "mine")
    return caught.value.message.removeprefix(f"{folder}/adapter_config.json does not exist")


def test_a_run_folder_suggests_its_latest_checkpoint(tmp_path):
    run = tmp_path / "my run"
    below(run, "checkpoint-90", "checkpoint-1000", "checkpoint-500/french", "best")
    (run / "checkpoint-2000").mkdir()  # nothing has been saved there yet
    assert refusal(run) == (
        ", but below it are checkpoint-1000, checkpoint-500/french, checkpoint-90, best; "
        f"to register the latest: loadout register mine '{run}/checkpoint-1000'"
    )


def test_many_adapters_are_not_all_listed(tmp_path):
    below(tmp_path, *(f"a{number:02}" for number in range(11)))
    assert refusal(tmp_path) == (
        ", but below it are a10, a09, a08, a07, a06, a05, a04, a03 and 3 others; "
        f"to register one: loadout register mine {tmp_path}/a10"
    )


@pytest.mark.parametrize(
    ("names", "which"),
    [
        (("myrun/checkpoint-1500", "myrun/checkpoint-1000", "myrun/checkpoint-500"), "the latest"),
        (("b/checkpoint-1000", "a/checkpoint-500", "final"), "one"),  # of two runs
        (("epoch_10", "epoch_2", "epoch_1"), "one"),
        (("run-2/epoch-3", "run-2/epoch-1", "run-1/epoch-20"), "one"),
        (("checkpoint-9/b", "checkpoint-9/c", "checkpoint-8/a"), "the latest"),
    ],
)
def test_the_highest_number_is_first(tmp_path, names, which):
    below(tmp_path, *reversed(names))
    assert refusal(tmp_path) == (
        f", but below it are {', '.join(names)}; "
        f"to register {which}: loadout register mine {tmp_path}/{names[0]}"
    )


def test_a_whole_model_is_called_one(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert refusal(tmp_path) == ": this is a whole model; register the adapter that PEFT saves"


def test_hostile_folders_are_read_in_part(tmp_path, monkeypatch):
    below(tmp_path, "x/y/too-deep", "\x1b[2J")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "linked").symlink_to(tmp_path / "x" / "y" / "too-deep")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "adapter_config.json")
    below(tmp_path, "closed/inner")
    scanned = []
    scan = os.scandir

    def counting(folder):
        scanned.append(folder)
        if Path(folder).name == "closed":  # to root no folder is
            raise PermissionError
        return scan(folder)

    monkeypatch.setattr(os, "scandir", counting)
    assert refusal(tmp_path) == ": is this a PEFT adapter?"
    assert str(tmp_path / "closed") in map(str, scanned)
    below(tmp_path / "many", *map(str, range(50)))
    scanned.clear()
    monkeypatch.setattr(upload_module, "MAX_SCANNED", 20)
    assert len(find_adapters(tmp_path / "many")) == 20
    assert len(scanned) == 1
