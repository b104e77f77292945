"""What a p2p tier can be told, and in which words it refuses the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forebay.errors import ConfigError
from forebay.tiers.p2p.options import Address, p2p_settings

GOOD: dict[str, object] = {"store": "unix:///run/store.sock", "listen": "127.0.0.1:7450"}


def test_addresses_are_hosts_and_ports() -> None:
    settings = p2p_settings("p", GOOD | {"peers": "b=localhost:1, c=[::1]:2 ,d-1.x=127.0.0.9:3", "push_to": "c"})
    assert [(peer.name, peer.address) for peer in settings.peers] == [
        ("b", Address("localhost", 1)), ("c", Address("::1", 2)), ("d-1.x", Address("127.0.0.9", 3)),
    ]  # fmt: skip
    assert settings.peers[1].address.endpoint == "tcp://[::1]:2"
    assert settings.push_to == ("c",)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"listen": "10.0.0.1:7450"}, "isn't on loopback, so connections need keys"),
        ({"listen": "0.0.0.0:7450"}, "isn't on loopback"),
        ({"listen": "[::]:7450"}, "isn't on loopback"),
        ({"peers": "b=10.0.0.2:7450"}, "peer b 10.0.0.2:7450 isn't on loopback"),
        ({"peers": "b=elsewhere.example:7450"}, "isn't on loopback"),
        ({"keys": "relative/keys"}, "absolute path"),
        ({"listen": "7450"}, "takes HOST:PORT"),
        ({"listen": "127.0.0.1:0"}, "takes HOST:PORT"),
        ({"peers": "127.0.0.1:7450"}, "NAME=HOST:PORT"),
        ({"peers": "a/b=127.0.0.1:7450"}, "NAME=HOST:PORT"),
        ({"peers": "b=127.0.0.1:1,b=127.0.0.1:2"}, "twice"),
        ({"push_to": "x"}, "push_to 'x' is none of the peers"),
        ({"store": "tcp://1.2.3.4:5"}, "unix:///PATH"),
        ({"listen": ""}, "takes listen"),
        ({"ask_s": 0}, "ask_s"),
        ({"stall_s": 61}, "stall_s"),
        ({"miss_s": -1}, "miss_s"),
        ({"lend_bytes": -1}, "lend_bytes"),
        ({"loads_at_once": 0}, "loads_at_once"),
        ({"bulk": "carrier-pigeon"}, "bulk"),
        ({"unknown": 1}, "unknown"),
        ({"listen": "10.0.0.1:7450", "keys": "/k", "bulk": "stream"}, "stream"),
        ({"bulk": "tls"}, "bulk tls takes keys"),
        ({"stream_port": 65536}, "stream_port"),
        ({"clear_peers": True}, "clear_peers takes keys"),
    ],
)
def test_what_cannot_be_is_refused_in_words(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=r"tier 'p'") as refused:
        p2p_settings("p", GOOD | options)
    assert words in str(refused.value)


def test_with_keys_any_address_is_taken() -> None:
    settings = p2p_settings("p", GOOD | {"listen": "10.0.0.1:7450", "peers": "b=10.0.0.2:1", "keys": "/etc/keys"})
    assert settings.keys == Path("/etc/keys")


@pytest.mark.parametrize(
    ("listen", "keys", "bulk", "way"),
    [
        ("127.0.0.1:1", "", "auto", "plain"), ("127.0.0.1:1", "/k", "auto", "plain"),
        ("127.0.0.1:1", "", "nixl", "plain"), ("127.0.0.1:1", "/k", "stream", "plain"),
        ("127.0.0.1:1", "/k", "tls", "tls"), ("10.0.0.1:1", "/k", "auto", "tls"),
        ("10.0.0.1:1", "/k", "nixl", "tls"), ("10.0.0.1:1", "/k", "tls", "tls"),
        ("127.0.0.1:1", "", "frames", ""), ("10.0.0.1:1", "/k", "frames", ""),
    ],
)  # fmt: skip
def test_streams_are_plain_on_loopback_alone(listen: str, keys: str, bulk: str, way: str) -> None:
    settings = p2p_settings("p", GOOD | {"listen": listen, "keys": keys, "bulk": bulk})
    assert (settings.serves_plain, settings.serves_tls) == (way == "plain", way == "tls")


def test_a_store_whose_peers_would_be_plain_over_the_network_does_not_start(tmp_path: Path) -> None:
    config = tmp_path / "forebay.toml"
    config.write_text(
        f'[tiers.p2p]\nkind = "p2p"\nstore = "unix://{tmp_path}/s"\nlisten = "0.0.0.0:17450"\n'
    )
    command = [sys.executable, "-m", "forebay", "store", "--config", str(config), "--socket", str(tmp_path / "s")]
    ended = subprocess.run([*command, "--memory", "16MiB"], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2 and "p2p.keys DIR" in ended.stderr
