"""The manifests of deploy/kubernetes: valid by Kubernetes' schemas, whole, confined, and of this version's commands."""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from forebay import __version__
from forebay.config import Arguments, resolve
from forebay.router import settings
from forebay.testing.cluster import Process, wait_for
from forebay.testing.ports import free_port
from forebay.tiers.p2p.keys import own_pair

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
VERSIONS = ("1.31", "1.34", "1.37")
SECRETS = {
    "node-keys": {"secret.key", "router.pub"}, "router-keys": {"secret.key", "node.pub", "worker-key"},
    "front-ends": {"api-keys", "server-secret"}, "bucket": set(), "gate-tls": {"tls.crt", "tls.key"},
}  # fmt: skip
"""What docs/deploy.md has people make beforehand."""


def kustomization() -> dict[str, Any]:
    return dict(yaml.safe_load((FOLDER / "kustomization.yaml").read_text()))


def documents() -> list[dict[str, Any]]:
    named = kustomization()["resources"]
    return [one for name in named for one in yaml.safe_load_all((FOLDER / name).read_text())]


def pods() -> list[tuple[str, dict[str, Any]]]:
    made = [one for one in documents() if "template" in one.get("spec", {})]
    return [(one["metadata"]["name"], one["spec"]["template"]["spec"]) for one in made]


def containers() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for name, pod in pods():
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            yield f"{name}/{container['name']}", pod, container


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid_by_the_schemas_of_kubernetes(version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="the extra `test` brings it").validate
    kinds = [one["kind"] for one in documents()]
    assert kinds == ["Namespace", "DaemonSet", "DaemonSet", "Deployment", "Service", "Service"]
    for one in documents():
        validate(one, version, strict=True)


def test_a_wrong_field_is_noticed() -> None:
    library = pytest.importorskip("kubernetes_validate", reason="the extra `test` brings it")
    wrong = next(one for one in documents() if one["kind"] == "DaemonSet")
    wrong["spec"]["template"]["spec"]["containers"][0]["resourcess"] = {}
    with pytest.raises(library.ValidationError):
        library.validate(wrong, VERSIONS[-1], strict=True)


def test_the_kustomization_names_every_file_and_this_version() -> None:
    made = kustomization()
    files = [*made["resources"], *(file for one in made["configMapGenerator"] for file in one["files"])]
    there = {path.name for path in FOLDER.iterdir()} - {"kustomization.yaml", "Dockerfile"}
    assert set(files) == there
    assert [image["newTag"] for image in made["images"]] == [__version__]
    assert f":{__version__}" in (FOLDER / "Dockerfile").read_text()
    assert (FOLDER / "nginx.conf").read_text().count("{") == (FOLDER / "nginx.conf").read_text().count("}")


def test_the_image_has_extras_that_there_are() -> None:
    extras = re.search(r"/source\[([\w,]+)\]", (FOLDER / "Dockerfile").read_text())
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras is not None and set(extras[1].split(",")) <= set(known)


def test_all_that_is_mounted_or_referred_to_is_there() -> None:
    generated = {one["name"] for one in kustomization()["configMapGenerator"]}
    for name, pod, container in containers():
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes, name
        for one in container.get("envFrom", ()):
            assert one["secretRef"]["name"] in SECRETS, name
    used: set[str] = set()
    for _, pod in pods():
        own = [container for _, one, container in containers() if one == pod]
        mounted = {mount["name"] for container in own for mount in container["volumeMounts"]}
        assert {volume["name"] for volume in pod["volumes"]} == mounted
        for volume in pod["volumes"]:
            if "configMap" in volume:
                used.add(volume["configMap"]["name"])
            for source in (volume, *volume.get("projected", {}).get("sources", ())):
                if "secret" in source:
                    assert (source["secret"].get("secretName") or source["secret"]["name"]) in SECRETS
    assert used == generated


def test_files_of_secrets_are_those_that_the_page_has_people_make() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    for secret, files in SECRETS.items():
        assert secret in page and all(file in page for file in files), secret
    scripts = " ".join(str(container.get("args")) for _, _, container in containers())
    assert set(re.findall(r"/keys/given/([\w.-]+)", scripts)) == set().union(*SECRETS.values()) - SECRETS["gate-tls"]


def test_everything_is_confined_and_knows_its_limits() -> None:
    for name, pod, container in containers():
        confined = {**pod["securityContext"], **container["securityContext"]}
        assert confined["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert confined["allowPrivilegeEscalation"] is False and confined["readOnlyRootFilesystem"] is True, name
        assert confined["capabilities"]["drop"] == ["ALL"], name
        if name != "store/prepare":  # it gives directories of the node to the store's user
            assert confined["runAsNonRoot"] is True and confined["runAsUser"] == 10001, name
            assert "add" not in confined["capabilities"], name
        assert container["resources"]["limits"]["memory"] and container["resources"]["requests"], name
        assert pod["automountServiceAccountToken"] is False and not pod.get("hostNetwork") and not pod.get("hostPID")
        if container["name"] != "prepare" and container["name"] != "worker":
            assert {"readinessProbe", "livenessProbe"} <= set(container), name


def test_a_pool_fits_its_volume_and_the_volume_its_containers_memory() -> None:
    (store,) = [container for name, _, container in containers() if name == "store/store"]
    pod = dict(pods())["store"]
    gib = {int(found) for found in re.findall(r"--memory=(\d+)GiB", str(store["args"]))}
    (pool,) = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "pool"]
    assert pool["medium"] == "Memory"
    limit = store["resources"]["limits"]["memory"]
    assert max(gib) < int(pool["sizeLimit"].removesuffix("Gi")) < int(limit.removesuffix("Gi"))


def started() -> list[tuple[str, list[str]]]:
    """Commands of ours, as they are started and as probes run them."""
    found = []
    for name, _, container in containers():
        whole = [*container.get("command", ()), *container.get("args", ())]
        probes = [container[probe] for probe in container if probe.endswith("Probe")]
        for words in (whole, *(probe.get("exec", {}).get("command", []) for probe in probes)):
            if words[:1] == ["forebay"]:
                found.append((name, [word.replace("$(POD_IP)", "10.0.0.7") for word in words[1:]]))
    return found


def parsed(words: list[str]) -> dict[str, Any]:
    """What the command itself makes of these words."""
    command, *rest = words
    module = importlib.import_module(f"forebay.cli.{command}")
    parser = Arguments(prog=command, argument_default=argparse.SUPPRESS)
    module.configure(parser)
    flags = vars(parser.parse_args([word.replace("/config/", f"{FOLDER}/") for word in rest]))
    return dict(resolve(command, module.SETTINGS, flags))


def test_commands_and_their_settings_are_this_versions() -> None:
    commands = started()
    assert {words[0] for _, words in commands} == {"store", "worker", "frontend", "router", "stat"}
    made = {words[0]: parsed(words) for _, words in commands}
    assert [(name, rule.kind) for name, rule in made["store"]["tiers"].items()] == [("disk", "fs"), ("bucket", "s3")]
    assert made["store"]["socket"] == made["stat"]["socket"]
    assert made["worker"]["store"] == f"unix://{made['store']['socket']}"
    assert made["frontend"]["host"] == "10.0.0.7" and made["frontend"]["api_keys"] is not None


def test_the_router_knows_ports_and_keys_of_the_nodes() -> None:
    values = parsed(next(words for _, words in started() if words[0] == "router"))
    ports = [port for _, _, one in containers() for port in one.get("ports", ()) if "hostPort" in port]
    assert all(port["containerPort"] == port["hostPort"] for port in ports)
    told = {int(found) for found in re.findall(r"node-\w:(\d+)", (FOLDER / "router.toml").read_text())}
    assert told == {port["hostPort"] for port in ports} == {5557, 5558, 5561, 5562, 8000}
    config = settings.RouterConfig(values["workers"], values["stores"], event_keys=values["event_keys"])
    settings.check(config)
    assert set(settings.servers_of(config).values()) == {"node"}


def test_a_store_starts_as_its_manifest_says_and_its_probe_finds_it(tmp_path: Path) -> None:
    words = dict(reversed(started()))["store/store"]
    probe = next(words for _, words in started() if words[0] == "stat")
    keys, friend = tmp_path / "keys", tmp_path / "friend"
    own_pair(keys)
    (keys / "router.pub").write_bytes(own_pair(friend).public)
    disk = (FOLDER / "store.toml").read_text().split("[tiers.bucket]")[0]
    (tmp_path / "store.toml").write_text(disk.replace("/files", f"{tmp_path}/files"))
    replaced = {
        "--config": f"{tmp_path}/store.toml", "--socket": f"{tmp_path}/store.sock", "--memory": "64MiB",
        "--pool-dir": "/dev/shm", "--event-keys": str(keys), "--events": f"tcp://127.0.0.1:{free_port()}",
        "--replay": f"tcp://127.0.0.1:{free_port()}", "--metrics": f"127.0.0.1:{free_port()}",
    }  # fmt: skip

    def here(given: list[str]) -> list[str]:
        parts = (word.partition("=") for word in given)
        return [f"{name}={replaced[name]}" if equals else name for name, equals, _ in parts]

    asking = [sys.executable, "-m", "forebay", *here(probe)]
    assert subprocess.run(asking, capture_output=True).returncode == 3, "nobody answers yet"
    store = Process("store", here(words), tmp_path / "log").start()
    try:
        wait_for("the probe", lambda: not subprocess.run(asking, capture_output=True).returncode, 60)
        assert (tmp_path / "files").is_dir()
    finally:
        assert store.end() == 0, (tmp_path / "log").read_text()
