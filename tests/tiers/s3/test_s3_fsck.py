"""`forebay fsck` of a bucket: what is sound is called so, what isn't is named, and put aside if that is wanted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forebay.cli.main import main
from forebay.errors import ConfigError, TierUnavailable
from forebay.testing.buckets import Server
from forebay.tiers.s3.fsck import BucketReport, check_prefix
from forebay.tiers.s3.options import s3_options
from tests.tiers.s3.conftest import MakeRig
from tests.tiers.s3.rig import S3Rig
from tests.tiers.s3.test_s3_codec import compressible, key_file
from tests.tiers.s3.test_s3_objects import BIG, packing, smalls, store_together
from tests.tiers.support import numbered


def check(rig: S3Rig, *, repair: bool = False, **more: object) -> BucketReport:
    return check_prefix("bucket", s3_options("bucket", {**rig.options, **more}), repair)


@pytest.mark.parametrize("kept", ["plain", "compressed", "encrypted"])
def test_sound_objects_are_called_sound_and_counted(
    make_rig: MakeRig, seaweed: Server, tmp_path: Path, kept: str
) -> None:
    small = smalls(5)
    options: dict[str, object] = packing(small) | {"pack_wait_s": 0.2}
    if kept == "compressed":
        options["compress"] = "zstd"
    if kept == "encrypted":
        options["encrypt_key_file"] = key_file(tmp_path, "a.key")
    rig = make_rig(seaweed, **options)
    store_together(rig, [*small, compressible(50, BIG), compressible(51, BIG)])
    report = check(rig)
    assert (report.chunks, report.problem_count, report.quarantined) == (7, 0, 0)
    assert report.objects == len(rig.objects()) == 3 and report.bytes == rig.bytes_in_bucket()
    assert report.sealed == {}


def test_without_its_key_a_chunk_is_checked_for_being_what_was_stored(
    make_rig: MakeRig, seaweed: Server, tmp_path: Path
) -> None:
    rig = make_rig(seaweed, encrypt_key_file=key_file(tmp_path, "a.key"))
    chunk = compressible(1, BIG)
    assert rig.store(chunk).ok
    sealed = check(rig, encrypt_key_file="").sealed
    assert list(sealed.values()) == [1] and len(next(iter(sealed))) > 8
    body = bytearray(rig.get(rig.name(chunk)))
    body[-1] ^= 1
    rig.put(rig.name(chunk), bytes(body))
    assert check(rig, encrypt_key_file="").problem_count == 1


def test_whatever_is_wrong_is_named_and_put_aside_whole(make_rig: MakeRig, seaweed: Server) -> None:
    small = smalls(5)
    rig = make_rig(seaweed, **packing(small))
    large = [numbered(100 + i, granule=BIG) for i in range(4)]
    store_together(rig, [*small, *large])
    flipped, cut, swapped, sound = (rig.name(chunk) for chunk in large)
    (segment,) = rig.objects("segments/")
    bodies = {name: rig.get(name) for name in (flipped, cut, swapped, segment)}
    rig.put(flipped, bodies[flipped][:-1] + bytes([bodies[flipped][-1] ^ 1]))
    rig.put(cut, bodies[cut][:-1])
    rig.put(swapped, rig.get(sound))
    rig.put(segment, bodies[segment][:-1] + bytes([bodies[segment][-1] ^ 1]))
    stray = f"{rig.prefix}/chunks/notes.txt"
    rig.put(stray, b"no chunk")

    found = check(rig)
    assert {problem.name for problem in found.problems} == {flipped, cut, swapped, segment, stray}
    assert found.chunks == 1 and not any(problem.repaired for problem in found.problems)
    why = {problem.name: problem.why for problem in found.problems}
    assert "another chunk" in why[swapped] and "no chunk's" in why[stray] and "chunk " in why[segment]

    repaired = check(rig, repair=True)
    assert repaired.problem_count == 5 and all(problem.repaired for problem in repaired.problems)
    assert rig.objects("chunks/") == [sound] and rig.objects("segments/") == []
    aside = rig.objects("quarantine/")
    assert len(aside) == repaired.quarantined == 5
    assert rig.get(f"{rig.prefix}/quarantine/chunks-notes.txt") == b"no chunk", "nothing is thrown away"
    after = check(rig)
    assert (after.chunks, after.problem_count, after.quarantined) == (1, 0, 5)
    assert rig.serves(large[3]) and not rig.serves(large[0])


def test_a_service_that_is_away_or_refuses_is_no_clean_bucket(make_rig: MakeRig, seaweed: Server) -> None:
    rig = make_rig(seaweed)
    with pytest.raises(TierUnavailable, match="checking s3://"):
        check(rig, endpoint_url="http://127.0.0.1:9", attempts=1)
    with pytest.raises(ConfigError, match="checking s3://"):
        check(rig, bucket="no-such-bucket")


def test_the_command_takes_a_tier_of_the_configuration(
    make_rig: MakeRig, seaweed: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = make_rig(seaweed)
    chunk = numbered(7, granule=BIG)
    assert rig.store(chunk).ok
    config = tmp_path / "forebay.toml"
    lines = [f"{name} = {json.dumps(value)}" for name, value in rig.options.items()]
    config.write_text('[tiers.bucket]\nkind = "s3"\n' + "\n".join(lines))
    asked = ["fsck", "--config", str(config), "--tier", "bucket"]
    assert main(asked) == 0
    assert "1 chunks in 1 objects" in capsys.readouterr().out
    rig.put(rig.name(chunk), b"torn")
    assert main([*asked, "--repair"]) == 1
    told = capsys.readouterr().out
    assert rig.name(chunk) in told and "(moved aside)" in told
    assert main(asked) == 0
    assert main(["fsck", "--config", str(config), "--tier", "disk"]) == 2
    assert "there are bucket" in capsys.readouterr().err
