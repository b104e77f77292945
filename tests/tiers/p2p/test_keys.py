"""CURVE: who has no key that is known here isn't let in, and whose key isn't the one that is known isn't believed."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import zmq

from forebay.errors import ConfigError
from forebay.testing.conformance import Pool, make_chunk
from forebay.tiers.p2p.keys import allowed, own_pair, peer_key
from forebay.tiers.p2p.wire import VERSION, Hello
from tests.tiers.p2p.dialers import Dialer
from tests.tiers.p2p.rig import Asker, Host
from tests.tiers.p2p.tap import Tap

CHUNK = make_chunk(granule=1 << 20)


def know(directory: Path, name: str, of: Path) -> None:
    own_pair(directory)
    (directory / f"{name}.pub").write_bytes((of / "public.key").read_bytes())


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Keys of `here` and `there`, which know each other."""
    here, there = tmp_path / "here", tmp_path / "there"
    own_pair(here)
    own_pair(there)
    know(here, "there", there)
    know(there, "here", here)
    return here, there


def test_hosts_that_know_each_others_keys_pull_through_curve(
    folders: tuple[Path, Path], open_all: ExitStack, pool: Pool
) -> None:
    here, there = folders
    host = open_all.enter_context(closing(Host("there", keys=str(there), bulk="frames")))
    host.source.put(CHUNK)
    asker = open_all.enter_context(closing(Asker(pool, host.address, keys=str(here), bulk="frames")))
    asker.sees("there")
    assert asker.driver.serves(CHUNK)
    assert asker.tier.statistics().info["encrypted"] == "yes"


def test_bytes_of_chunks_do_not_show_on_the_wire(folders: tuple[Path, Path], open_all: ExitStack, pool: Pool) -> None:
    here, there = folders
    seen = {}
    for keys in (True, False):
        options = ({"keys": str(there)}, {"keys": str(here)}) if keys else ({}, {})
        host = open_all.enter_context(closing(Host("there", bulk="frames", **options[0])))
        host.source.put(CHUNK)
        tap = open_all.enter_context(closing(Tap(host.port)))
        asker = open_all.enter_context(closing(Asker(pool, f"there=127.0.0.1:{tap.port}", bulk="frames", **options[1])))
        asker.sees("there")
        assert asker.driver.serves(CHUNK)
        seen[keys] = bytes(tap.seen)
    assert CHUNK.payload[5000:5100] in seen[False], "the tap works"
    assert CHUNK.payload[5000:5100] not in seen[True]
    assert CHUNK.header.tokens not in seen[True]


def test_who_is_not_known_is_turned_away(folders: tuple[Path, Path], open_all: ExitStack, tmp_path: Path) -> None:
    _, there = folders
    host = open_all.enter_context(closing(Host("there", keys=str(there))))
    server = own_pair(there).public
    strangers = [
        Dialer(host.port, hello=False),  # plain
        Dialer(host.port, hello=False, keys=(*zmq.curve_keypair(), server)),  # a key that nobody knows
        Dialer(host.port, hello=False, keys=(*zmq.curve_keypair(), zmq.curve_keypair()[0])),  # and the wrong server's
    ]
    for stranger in strangers:
        open_all.enter_context(closing(stranger))
        stranger.say(Hello(VERSION, "stranger", b"s" * 16, False))
        assert stranger.silent(0.3)
    assert host.tier.statistics().values["guests"] == 0


def test_a_host_with_another_key_than_the_known_one_is_not_believed(
    folders: tuple[Path, Path], open_all: ExitStack, pool: Pool, tmp_path: Path
) -> None:
    here, _ = folders
    impostor = tmp_path / "impostor"
    know(impostor, "here", here)
    host = open_all.enter_context(closing(Host("there", keys=str(impostor))))
    host.source.put(CHUNK)
    asker = open_all.enter_context(closing(Asker(pool, host.address, keys=str(here))))
    asker.until(lambda: asker.value("peer.there.downs") > 0, "Hello to stay unanswered")
    assert asker.driver.load(CHUNK).result.reason == "missing"


def test_a_key_that_is_added_lets_its_host_in_without_a_restart(
    open_all: ExitStack, pool: Pool, tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    own_pair(here)
    own_pair(there)
    know(here, "there", there)
    host = open_all.enter_context(closing(Host("there", keys=str(there))))
    host.source.put(CHUNK)
    asker = open_all.enter_context(closing(Asker(pool, host.address, keys=str(here))))
    asker.until(lambda: asker.value("peer.there.downs") > 0, "Hello to stay unanswered")
    know(there, "here", here)
    asker.sees("there")
    assert asker.driver.serves(CHUNK)


def test_the_command_makes_a_private_pair_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "forebay.tiers.p2p.keys", str(tmp_path / "keys")]
    first, again = (subprocess.run(command, capture_output=True, text=True, timeout=60, check=True) for _ in range(2))
    assert first.stdout == again.stdout and len(first.stdout.strip()) == 40
    secret = tmp_path / "keys" / "secret.key"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "keys" / "public.key").read_text() == first.stdout
    assert own_pair(tmp_path / "keys").public == first.stdout.strip().encode()


def test_a_secret_that_others_can_read_or_that_is_none_is_refused(tmp_path: Path) -> None:
    own_pair(tmp_path)
    secret = tmp_path / "secret.key"
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        own_pair(tmp_path)
    secret.chmod(0o600)
    secret.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="isn't a public and a secret key"):
        own_pair(tmp_path)


def test_public_keys_that_are_none_let_nobody_in(tmp_path: Path) -> None:
    (tmp_path / "bad.pub").write_bytes(b"not a key")
    (tmp_path / "good.pub").write_bytes(b"x" * 40)
    assert allowed(tmp_path) == {b"x" * 40: "good"}
    with pytest.raises(ConfigError, match="40 characters"):
        peer_key(tmp_path, "bad")
    with pytest.raises(ConfigError, match=r"copy public\.key of host absent there"):
        peer_key(tmp_path, "absent")
