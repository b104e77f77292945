"""stat, ls, fsck and explain tell the truth about a store and its files, and end with the right code."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.kvstore.client import StoreClient
from forebay.kvstore.extents import pool_path
from forebay.kvstore.identity import GroupGeometry, Namespace
from tests.cli.commands import RunningStore, told
from tests.kvstore.running import payload_of, prompt_of, put

SPEC = Namespace(
    b"weights", (GroupGeometry("full", "full", (0, 1), 1, 16, "float32"),), chunk_tokens=32, compute="float32"
)
TOKENS = [random.Random(5).randrange(1000) for _ in range(80)]
CHUNKS = 3  # 32 + 32 + a tail of 16


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStore]:
    store = RunningStore(tmp_path_factory.mktemp("store"))
    store.start()
    with StoreClient(str(store.socket)) as client:
        client.register(SPEC, "tiny")
        assert put(client, SPEC, TOKENS) == CHUNKS
    store.wait_for(lambda values: values.get("tier.fs.stored_chunks", CHUNKS) == CHUNKS)
    store.wait_for(lambda values: values["tier.fs.stores_running"] == 0)
    yield store
    if store.process is not None and store.process.poll() is None:
        store.stop()


def test_stat_shows_namespaces_tiers_and_figures(store: RunningStore) -> None:
    text = told("stat", "--socket", store.socket)
    assert "tiny" in text and SPEC.id.hex()[:16] in text and "tier fs" in text
    told_json = json.loads(told("stat", "--socket", f"unix://{store.socket}", "--json"))
    assert told_json["values"]["host.entries"] == CHUNKS and told_json["pid"] == store.process.pid  # type: ignore[union-attr]
    assert [namespace["id"] for namespace in told_json["namespaces"]] == [SPEC.id.hex()]


def test_ls_lists_every_chunk_with_its_tiers(store: RunningStore) -> None:
    text = told("ls", "--socket", store.socket)
    assert text.count(SPEC.id.hex()[:16]) == CHUNKS and f"{CHUNKS} chunks" in text
    lines = [json.loads(line) for line in told("ls", "--socket", store.socket, "--json").splitlines()]
    assert sorted((line["start"], line["end"]) for line in lines) == [(0, 32), (32, 64), (64, 80)]
    assert {line["tiers"] for line in lines} == {"host+fs"}


def test_ls_of_the_files_needs_no_store_and_agrees(store: RunningStore) -> None:
    memory = [json.loads(line) for line in told("ls", "--socket", store.socket, "--json").splitlines()]
    files = [json.loads(line) for line in told("ls", "--fs", store.files, "--json").splitlines()]
    assert {line["key"] for line in memory} == {line["key"] for line in files}


def test_ls_can_be_narrowed(store: RunningStore) -> None:
    assert len(told("ls", "--socket", store.socket, "--json", "--limit", 2).splitlines()) == 2
    assert told("ls", "--socket", store.socket, "--json", "--namespace", "00ff00ff") == ""


def test_a_socket_can_come_from_the_environment(store: RunningStore) -> None:
    assert "tiny" in told("stat", environment={"FOREBAY_STAT_SOCKET": str(store.socket)})


def test_explain_says_how_far_each_tier_reaches(store: RunningStore) -> None:
    ids = ",".join(map(str, [*TOKENS[:50], *([7] * 30)]))
    answer = json.loads(told("explain", "--socket", store.socket, "--token-ids", ids, "--json"))
    assert answer["tokens"] == 80 and answer["hit"] == 48
    host = next(reach for reach in answer["reaches"] if reach["tier"] == "host")
    assert (host["group"], host["tokens"]) == ("full", 48) and host["reason"]
    text = told("explain", "--socket", store.socket, "--token-ids", ids)
    assert "a hit of 48" in text and "host" in text and "fs" in text


def test_explain_tells_another_salt_from_never_seen(store: RunningStore) -> None:
    ids = ",".join(map(str, TOKENS))
    salted = json.loads(told("explain", "--socket", store.socket, "--token-ids", ids, "--root", "ab" * 32, "--json"))
    assert salted["hit"] == 0 and salted["reaches"][0]["reason"] == "salt"
    unseen = ",".join("9" for _ in range(40))
    never = json.loads(told("explain", "--socket", store.socket, "--token-ids", unseen, "--json"))
    assert never["reaches"][0]["reason"] == "never seen"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--token-ids", "1,x"], "--token-ids"), (["--token-ids", "-1"], "--token-ids"), (["text"], "--url"),
        (["--token-ids", "1", "--namespace", "zz"], "--namespace"),
        (["--token-ids", "1", "--namespace", "00"], "--namespace"),
        (["--token-ids", "1", "--root", "ab"], "--root"), (["--token-ids", "1", "--cache-salt", "x"], "--cache-salt"),
    ],
)  # fmt: skip
def test_explain_refuses_what_it_cannot_use(store: RunningStore, arguments: list[str], named: str) -> None:
    assert named in told("explain", "--socket", store.socket, *arguments, code=2)


def test_fsck_of_sound_bytes_is_0(store: RunningStore) -> None:
    text = told("fsck", "--socket", store.socket, "--fs", store.files)
    assert f"memory: {CHUNKS} chunks" in text and f"files: {CHUNKS} chunks" in text and "0 damaged" in text


def test_fsck_finds_a_flipped_bit_in_a_file_and_moves_it_aside(store: RunningStore) -> None:
    line = json.loads(told("ls", "--fs", store.files, "--json").splitlines()[0])
    flip(Path(line["path"]), -5)
    assert line["path"] in told("fsck", "--fs", store.files, code=1)
    assert "moved aside" in told("fsck", "--fs", store.files, "--repair", code=1)
    assert "0 damaged" in told("fsck", "--fs", store.files)
    assert len(told("ls", "--fs", store.files, "--json").splitlines()) == CHUNKS - 1


def test_fsck_finds_a_flipped_bit_in_memory_and_takes_it_out(store: RunningStore) -> None:
    prompt = prompt_of(SPEC, TOKENS)
    wanted = payload_of(SPEC, 0, prompt.chunk(0, 0).key, 32)[:64]
    for extent in pool_path(Path("/dev/shm"), store.socket).glob("extent-*"):
        at = extent.read_bytes().find(wanted)
        if at >= 0:
            flip(extent, at + 9)
            break
    else:
        raise AssertionError("the chunk is in no extent")
    assert "checksums differ" in told("fsck", "--socket", store.socket, code=1)
    assert "taken out" in told("fsck", "--socket", store.socket, "--repair", code=1)
    assert f"memory: {CHUNKS - 1} chunks" in told("fsck", "--socket", store.socket)


def test_without_a_store_the_tools_say_how_to_start_one(tmp_path: Path) -> None:
    for command in (["stat"], ["ls"], ["fsck"], ["explain", "--token-ids", "1"]):
        assert "forebay store" in told(*command, "--socket", tmp_path / "none.sock", code=3)


def test_a_directory_that_holds_no_files_of_ours_is_refused(tmp_path: Path) -> None:
    assert str(tmp_path) in told("fsck", "--fs", tmp_path, code=4)
    assert "nowhere" in told("ls", "--fs", tmp_path / "nowhere", code=4)


def flip(path: Path, at: int) -> None:
    """Flip one bit of a file; a negative offset counts from its end."""
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
