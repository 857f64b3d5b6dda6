"""An S3 server for tests: a real SeaweedFS of the virtual environment.

Use the `s3` fixture (imported by `tests/conftest.py` or a test package's own). When
`S3_ENDPOINT_URL` is set, as `bin/test` does, that store is used under a random prefix.
"""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from hosts.volumes.objects import StoreConfig

START_TIMEOUT_S = 60
PORTS = range(21000, 22000)
"""Each also takes the port 10,000 above (gRPC); below the kernel's ephemeral range."""

BUCKET = "sandkeep"


def free_ports(count: int) -> list[int]:
    """Find ports that are free together with their gRPC partner."""
    found: list[int] = []
    start = secrets.randbelow(len(PORTS) - 200)
    for port in PORTS[start:]:
        if _is_free(port) and _is_free(port + 10_000):
            found.append(port)
            if len(found) == count:
                return found
    raise RuntimeError("No free ports.")


def _is_free(port: int) -> bool:
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class SeaweedServer:
    """A `weed mini` on loopback; can be stopped, killed and started again on its data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = free_ports(5)
        self.config = StoreConfig(
            endpoint_url=f"http://127.0.0.1:{self.ports[0]}",
            bucket=BUCKET,
            access_key_id="test" + secrets.token_hex(6),
            secret_access_key=secrets.token_hex(16),
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        for name in ("config", "data"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        s3, master, volume, filer, admin = self.ports
        command = [
            str(Path(sys.executable).with_name("weed")),
            f"-config_dir={self.folder / 'config'}", "-logtostderr=true", "mini",
            f"-dir={self.folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-webdav=false", "-admin.ui=false", "-master.telemetry=false",
            "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.allowDeleteBucketNotEmpty=false",
            "-s3.autoCreateBucket=false", "-volume.max=400", f"-s3.port={s3}",
            f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}",
            f"-admin.port={admin}",
        ]  # fmt: skip
        environment = os.environ | {
            "AWS_ACCESS_KEY_ID": self.config.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.config.secret_access_key,
            "GOMEMLIMIT": "512MiB",
        }
        with (self.folder / "weed.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._make_bucket()

    def _make_bucket(self) -> None:
        client = boto3.client(
            "s3",
            endpoint_url=self.config.endpoint_url,
            region_name=self.config.region,
            aws_access_key_id=self.config.access_key_id,
            aws_secret_access_key=self.config.secret_access_key,
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                client.create_bucket(Bucket=BUCKET)
                client.put_object(Bucket=BUCKET, Key="canary", Body=b"chirp")
            except client.exceptions.BucketAlreadyOwnedByYou:
                pass
            except (ClientError, BotoCoreError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
                continue
            client.close()
            return

    def stop(self, *, with_signal: int = signal.SIGTERM) -> None:
        """End the server; its data stays for the next start."""
        if self._process is None:
            return
        self._process.send_signal(with_signal)
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


@contextmanager
def seaweed(folder: Path) -> Iterator[SeaweedServer]:
    """Run a server of one's own, for tests that stop it."""
    server = SeaweedServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreConfig]:
    """One store for the whole run."""
    endpoint_url = os.environ.get("S3_ENDPOINT_URL")
    if endpoint_url:
        yield StoreConfig(
            endpoint_url=endpoint_url,
            bucket=os.environ["S3_BUCKET"],
            access_key_id=os.environ["S3_ACCESS_KEY_ID"],
            secret_access_key=os.environ["S3_SECRET_ACCESS_KEY"],
            region=os.environ.get("S3_REGION", "us-east-1"),
            prefix=os.environ.get("S3_PREFIX", ""),
        )
        return
    with seaweed(tmp_path_factory.mktemp("s3")) as server:
        yield server.config


@pytest.fixture
def s3(s3_server: StoreConfig) -> StoreConfig:
    """An empty store: a random prefix in the run's one."""
    return StoreConfig(
        endpoint_url=s3_server.endpoint_url,
        bucket=s3_server.bucket,
        access_key_id=s3_server.access_key_id,
        secret_access_key=s3_server.secret_access_key,
        region=s3_server.region,
        prefix=f"{s3_server.prefix}test-{secrets.token_hex(8)}/",
    )
