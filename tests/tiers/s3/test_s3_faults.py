"""A server that is away, hangs, lies or won't have us, and a network that does what networks do."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.errors import ConfigError, TierUnavailable
from forebay.testing.buckets import SECRET, SeaweedFS, Server
from forebay.testing.chaosproxy import ChaosProxy, Weather
from forebay.tiers.s3.finder import ASKED_A_LOOKUP, PROBES_MAX
from forebay.tiers.s3.tier import S3Tier
from tests.tiers.s3.conftest import MakeRig
from tests.tiers.s3.rig import BUCKET, S3Rig, options_of
from tests.tiers.support import Made, numbered

BIG = 512 << 10
OPEN, CLOSED = 2.0, 0.0


@pytest.fixture
def proxy(seaweed: Server) -> Iterator[ChaosProxy]:
    with ChaosProxy(("127.0.0.1", seaweed.port), seed=7) as made:
        yield made


@pytest.fixture
def rig(make_rig: MakeRig, seaweed: Server, proxy: ChaosProxy) -> S3Rig:
    """A tier behind the proxy; what goes around it doesn't go through it."""
    return make_rig(seaweed, endpoint_url=f"http://127.0.0.1:{proxy.port}", refresh_s=0.0, timeout_s=1.0)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A SeaweedFS of this test's own, which it may kill."""
    if SeaweedFS.absent():
        pytest.skip(str(SeaweedFS.absent()))
    with SeaweedFS(tmp_path / "own") as server:
        server.make_bucket(BUCKET)
        yield server


def took(rig: S3Rig, chunk: Made, deadline_s: float) -> tuple[bool, float]:
    """Was it served, and after how long."""
    began = time.monotonic()
    loaded = rig.load(chunk, deadline_s=deadline_s)
    assert not loaded.result.ok or loaded.payload == chunk.payload
    return loaded.result.ok, time.monotonic() - began


# --- the network -------------------------------------------------------------------------------------------


def test_slow_and_sliced_answers_are_right(rig: S3Rig, proxy: ChaosProxy) -> None:
    chunks = [numbered(1, granule=20_000), numbered(2)]
    proxy.weather = Weather(delay_s=0.01, jitter_s=0.01, slice_bytes=700)
    for chunk in chunks:
        assert rig.store(chunk).ok
        assert rig.has(chunk) and rig.serves(chunk)


@pytest.mark.parametrize(
    "weather",
    [
        Weather(silent=True), Weather(bytes_per_s=20_000, direction="to_client"),
        Weather(delay_s=5.0, direction="to_client"), Weather(silent=True, direction="to_server"),
    ],
    ids=["silence", "a trickle", "a long delay", "silence one way"],
)  # fmt: skip
def test_a_load_is_a_miss_by_its_deadline_whatever_its_connection_does(
    rig: S3Rig, proxy: ChaosProxy, weather: Weather
) -> None:
    chunk = numbered(1, granule=BIG)
    rig.store(chunk)
    assert rig.serves(chunk)
    proxy.weather = weather
    served, seconds = took(rig, chunk, 0.3)
    assert not served and 0.25 <= seconds < 1.0
    proxy.weather = Weather()
    proxy.reset_all()
    rig.until(lambda: rig.value("breaker_state") == CLOSED and rig.serves(chunk), "it to be well again")


@pytest.mark.parametrize("how", ["reset_after", "end_after"])
def test_a_connection_that_breaks_in_the_middle_is_tried_again(rig: S3Rig, proxy: ChaosProxy, how: str) -> None:
    chunk = numbered(1, granule=BIG)
    rig.store(chunk)
    proxy.weather = Weather(**{how: 300_000, "direction": "to_client"})  # type: ignore[arg-type]
    served, seconds = took(rig, chunk, 5.0)
    assert not served and seconds < 5.0, "each attempt breaks"
    assert rig.value("retries") >= 2 and rig.value("breaker_state") == CLOSED
    proxy.weather = Weather()
    assert rig.serves(chunk)


def test_bits_that_flip_on_the_way_are_never_served(rig: S3Rig, proxy: ChaosProxy) -> None:
    chunks = [numbered(i, granule=60_000) for i in range(6)]
    for chunk in chunks:
        rig.store(chunk)
    proxy.weather = Weather(flip_every=100_000, direction="to_client")
    for _ in range(4):
        for chunk in chunks:
            took(rig, chunk, 2.0)  # right bytes or none
    assert proxy.counts["flips"] > 0
    assert rig.value("loads_read_again") + rig.value("requests_broken") + rig.value("loads_corrupt") > 0
    proxy.weather = Weather()
    proxy.reset_all()
    rig.until(lambda: rig.value("breaker_state") == CLOSED, "it to be well again")
    for chunk in chunks:
        assert rig.store(chunk).ok and rig.serves(chunk)


def test_a_server_that_is_away_opens_the_circuit_and_what_is_asked_then_is_a_miss_at_once(
    rig: S3Rig, proxy: ChaosProxy
) -> None:
    there, new = numbered(1), numbered(2)
    rig.store(there)
    proxy.weather = Weather(refuse=True)
    proxy.reset_all()
    rig.until(lambda: not took(rig, there, 2.0)[0] and rig.value("breaker_state") != CLOSED, "the circuit to open")
    opened = rig.value("breaker_opened")
    asked = sum(rig.value(f"requests_{name}") for name in ("get", "put"))
    began = time.monotonic()
    for _ in range(20):
        assert rig.load(there).result.reason == "io"
        assert rig.store(new).reason == "io"
        assert not rig.has(there), "no promise is made that can't be kept"
    assert time.monotonic() - began < 20.0
    assert sum(rig.value(f"requests_{name}") for name in ("get", "put")) == asked, "nothing was asked of it"
    assert opened >= 1 and rig.engine.stats().info["breaker"] in ("open", "half_open")
    proxy.weather = Weather()
    rig.until(lambda: rig.value("breaker_state") == CLOSED, "the trial that closes it")
    assert rig.has(there) and rig.serves(there) and rig.store(new).ok


def test_retries_against_a_failing_server_stay_within_their_budget(
    make_rig: MakeRig, seaweed: Server, proxy: ChaosProxy
) -> None:
    rig = make_rig(
        seaweed, endpoint_url=f"http://127.0.0.1:{proxy.port}", refresh_s=0.0, retry_budget=5.0, failures_max=1000,
        attempts=10, pack_below_bytes=0,
    )  # fmt: skip
    proxy.weather = Weather(refuse=True)
    proxy.reset_all()
    before = rig.value("requests_put")
    results = rig.finish([rig.store_job(numbered(i)) for i in range(20)])
    assert not any(result.ok for result in results.values())
    assert rig.value("requests_put") - before <= 20 + 5
    assert rig.value("retries") <= 5 and rig.value("retries_refused") >= 15


def test_a_put_whose_answer_is_lost_leaves_nothing_that_isnt_counted(
    make_rig: MakeRig, seaweed: Server, proxy: ChaosProxy
) -> None:
    rig = make_rig(
        seaweed, endpoint_url=f"http://127.0.0.1:{proxy.port}", refresh_s=0.0, timeout_s=0.5, attempts=1
    )
    chunk = numbered(1, granule=20_000)
    proxy.weather = Weather(silent=True, direction="to_client")
    result = rig.store(chunk)
    assert not result.ok
    proxy.weather = Weather()
    proxy.reset_all()
    rig.until(lambda: rig.value("breaker_state") == CLOSED and rig.value("doomed") == 0, "what may be there to go")
    assert rig.objects() == [] and rig.value("bytes") == 0
    assert rig.store(chunk).ok and rig.serves(chunk)


def test_what_a_silent_server_is_asked_for_is_bounded_and_what_goes_beyond_is_dropped_and_counted(
    make_rig: MakeRig, seaweed: Server, proxy: ChaosProxy
) -> None:
    rig = make_rig(
        seaweed, endpoint_url=f"http://127.0.0.1:{proxy.port}", refresh_s=0.0, timeout_s=1.0, failures_max=10_000,
        read_queue_bytes=100_000, read_threads=2,
    )  # fmt: skip
    chunk = numbered(1, granule=10_000)
    rig.store(chunk)
    proxy.weather = Weather(silent=True)
    loads = [rig.load_job(chunk, deadline_s=0.5) for _ in range(20)]
    rig.engine.begin(loads)
    assert rig.value("read_queue_bytes") <= 100_000
    for batch in range(6):
        queries = [numbered(1000 + batch * 300 + i).query() for i in range(300)]
        outcomes = [answer.outcome for answer in rig.engine.lookup_once(queries)]
        assert outcomes.count("retry") <= ASKED_A_LOOKUP and set(outcomes) <= {"retry", "away"}
    assert rig.value("fronts_open") <= PROBES_MAX and rig.value("fronts_passed_over") >= 1800 - PROBES_MAX
    results = rig.results_of(loads)
    reasons = [result.reason for result in results.values()]
    assert set(reasons) == {"dropped", "late"} and reasons.count("dropped") == rig.value("loads_dropped") >= 15
    assert rig.value("deadlines") == 0


def test_a_close_doesnt_wait_for_a_silent_server(rig: S3Rig, proxy: ChaosProxy) -> None:
    chunk = numbered(1, granule=BIG)
    rig.store(chunk)
    proxy.weather = Weather(silent=True)
    jobs = [rig.load_job(chunk), *(rig.store_job(numbered(i)) for i in range(2, 10))]
    rig.engine.begin(jobs)
    began = time.monotonic()
    rig.close()
    assert time.monotonic() - began < 20.0
    rig.engine.last_words(rig.results, rig.changes)
    assert {result.id for result in rig.results if not result.ok} >= {job.id for job in jobs}


# --- the server --------------------------------------------------------------------------------------------


def test_a_server_that_is_killed_and_comes_back_costs_misses_and_no_wrong_byte(
    make_rig: MakeRig, own_server: Server
) -> None:
    rig = make_rig(own_server, timeout_s=1.0)
    old, new = [numbered(i, granule=50_000) for i in range(8)], [numbered(100 + i, granule=50_000) for i in range(30)]
    for chunk in old:
        assert rig.store(chunk).ok
    stores, loads = [rig.store_job(chunk) for chunk in new], [rig.load_job(chunk) for chunk in old]
    rig.engine.begin(stores[:10])
    own_server.kill()
    rig.engine.begin([*loads, *stores[10:]])
    results = rig.results_of([*loads, *stores])
    for job, chunk in zip(loads, old, strict=True):
        rig.check_load(job, chunk, results[job.id])
    rig.until(lambda: rig.value("queue_bytes") == 0, "every queue to be empty")
    own_server.start()
    rig.until(lambda: rig.value("breaker_state") == CLOSED, "the circuit to close")
    rig.until(lambda: rig.value("doomed") == 0, "what is doubtful to go")
    assert all(rig.serves(chunk) for chunk in old)
    for job, chunk in zip(stores, new, strict=True):
        assert rig.serves(chunk) == results[job.id].ok
    assert rig.value("bytes") == rig.bytes_in_bucket()


def test_a_server_that_stands_still_costs_misses_by_their_deadlines(make_rig: MakeRig, seaweed: Server) -> None:
    rig = make_rig(seaweed, timeout_s=5.0, failures_max=3)
    chunks = [numbered(i, granule=50_000) for i in range(4)]
    for chunk in chunks:
        rig.store(chunk)
    seaweed.stop_it()
    try:
        began = time.monotonic()
        jobs = [rig.load_job(chunk, deadline_s=0.3) for chunk in chunks]
        assert {result.reason for result in rig.finish(jobs).values()} <= {"late", "io"}
        assert time.monotonic() - began < 4.0
        rig.until(lambda: rig.value("breaker_state") != CLOSED, "the circuit to open")
        assert not rig.has(chunks[0])
    finally:
        seaweed.continue_it()
    rig.until(lambda: rig.value("breaker_state") == CLOSED, "the circuit to close")
    assert all(rig.serves(chunk) for chunk in chunks)


# --- starting ----------------------------------------------------------------------------------------------


def start(server: Server, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], **options: object) -> S3Tier:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return S3Tier("bucket", options_of(server, {"prefix": "start", **options}))


@pytest.mark.parametrize(
    "environment",
    [
        {"AWS_ACCESS_KEY_ID": "AKIAUNKNOWN", "AWS_SECRET_ACCESS_KEY": "hunter2hunter2"},
        {"AWS_ACCESS_KEY_ID": "forebay-test-key", "AWS_SECRET_ACCESS_KEY": "hunter2hunter2"},
        {},
    ],
    ids=["an unknown key", "a wrong secret", "none"],
)
def test_wrong_credentials_are_said_at_the_start_once_and_without_the_secret(
    seaweed: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, environment: dict[str, str]
) -> None:
    caplog.set_level(logging.DEBUG)
    began = time.monotonic()
    with pytest.raises(ConfigError, match="credentials of the AWS chain") as told:
        start(seaweed, monkeypatch, environment)
    assert time.monotonic() - began < 20.0
    assert "hunter2" not in str(told.value) + caplog.text and "AKIAUNKNOWN" not in str(told.value) + caplog.text


def test_a_server_that_is_away_is_said_to_be_and_is_tried_again_later(
    seaweed: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TierUnavailable, match="tries again"):
        start(seaweed, monkeypatch, seaweed.environment, endpoint_url="http://127.0.0.1:9")


def test_a_bucket_that_isnt_there_is_named(seaweed: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no-such-bucket"):
        start(seaweed, monkeypatch, seaweed.environment, bucket="no-such-bucket")


def test_a_profile_that_isnt_there_is_refused(seaweed: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="profile"):
        start(seaweed, monkeypatch, seaweed.environment, profile="nobody")


def test_without_boto3_the_extra_is_named(seaweed: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ConfigError, match=r"forebay\[s3\]"):
        start(seaweed, monkeypatch, seaweed.environment)


def test_no_secret_is_written_anywhere_while_everything_goes_wrong(
    seaweed: Server, caplog: pytest.LogCaptureFixture, tmp_path: Path, make_rig: MakeRig
) -> None:
    """The root logger at DEBUG, a server that breaks, and all files of the tier."""
    caplog.set_level(logging.DEBUG)
    with ChaosProxy(("127.0.0.1", seaweed.port), seed=1) as proxy:
        rig = make_rig(seaweed, endpoint_url=f"http://127.0.0.1:{proxy.port}", state_dir=str(tmp_path / "state"))
        chunk = numbered(1, granule=20_000)
        rig.store(chunk)
        for weather in (Weather(reset_after=100), Weather(end_after=100, direction="to_client"), Weather(refuse=True)):
            proxy.weather = weather
            proxy.reset_all()
            rig.load(chunk, deadline_s=0.5)
            rig.store(numbered(2))
            rig.has(numbered(3))
        stats = rig.engine.stats()
        rig.close()
    kept = b"".join(path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file())
    assert caplog.text, "something was said"
    assert SECRET not in caplog.text + str(stats) + str(rig.results) and SECRET.encode() not in kept
    assert "Signature=" not in caplog.text and "AWS4-HMAC" not in caplog.text


def test_the_tiers_own_process_writes_no_secret_either(seaweed: Server, tmp_path: Path) -> None:
    """A store whose S3 credentials are wrong: it says so on its standard error, and ends."""
    config = tmp_path / "forebay.toml"
    config.write_text(
        f'[tiers.far]\nkind = "s3"\nbucket = "{BUCKET}"\nendpoint_url = "{seaweed.endpoint}"\naddressing = "path"\n'
    )
    environment = {
        "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ACCESS_KEY_ID": "AKIAWRONG", "AWS_SECRET_ACCESS_KEY": "hunter2hunter2",
    }  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-m", "forebay", "store", "--config", str(config), "--socket", str(tmp_path / "s"),
         "--memory", "16MiB"],
        capture_output=True, text=True, timeout=60, check=False, env=environment,
    )  # fmt: skip
    assert ended.returncode == 2 and "'far'" in ended.stderr and "credentials" in ended.stderr
    assert "hunter2" not in ended.stderr + ended.stdout and "AKIAWRONG" not in ended.stderr + ended.stdout
