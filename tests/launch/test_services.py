import socket
import urllib.error
import urllib.request
from pathlib import Path

import boto3
import psycopg
import pytest
import redis
from botocore.config import Config as BotoConfig
from botocore.exceptions import ClientError

from launch import processes
from launch.config import Config
from launch.people import Person
from launch.ports import is_free
from launch.progress import LaunchFailed
from launch.services import own_services, postgres, redis_server, s3_ports, seaweedfs
from launch.supervisor import Supervisor


def test_postgres_keeps_its_data_over_a_restart(
    config: Config, who: Person, supervisor: Supervisor
) -> None:
    supervisor.start_service(postgres(config, who))
    with psycopg.connect(config.env["DATABASE_URL"]) as database:
        database.execute("CREATE TABLE kept AS SELECT 1 AS one")
    supervisor.stop()
    assert is_free(config.port("POSTGRES_PORT"))

    again = Supervisor(config)
    try:
        again.start_service(postgres(config, who))
        with psycopg.connect(config.env["DATABASE_URL"]) as database:
            assert database.execute("SELECT one FROM kept").fetchone() == (1,)
    finally:
        again.stop()


def test_redis_asks_for_its_password(
    config: Config, who: Person, supervisor: Supervisor
) -> None:
    supervisor.start_service(redis_server(config, who))

    with redis.Redis.from_url(config.env["REDIS_URL"]) as client:
        assert client.set("a", "b")
    with (
        redis.Redis(port=config.port("REDIS_PORT")) as stranger,
        pytest.raises(redis.AuthenticationError),
    ):
        stranger.get("a")


def test_the_object_store_keeps_strangers_out_by_every_door(
    config: Config, who: Person, supervisor: Supervisor
) -> None:
    supervisor.start_service(seaweedfs(config, who))
    wrong_key = boto3.client(
        "s3",
        endpoint_url=config.env["S3_ENDPOINT_URL"],
        region_name="us-east-1",
        aws_access_key_id=config.env["S3_ACCESS_KEY_ID"],
        aws_secret_access_key="wrong",
        config=BotoConfig(retries={"total_max_attempts": 1}),
    )

    with pytest.raises(ClientError) as refused:
        wrong_key.list_objects_v2(Bucket=config.env["S3_BUCKET"])
    wrong_key.close()

    assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403
    for port in s3_ports(config):
        url = f"http://127.0.0.1:{port}/buckets/{config.env['S3_BUCKET']}/sandkeep-canary"
        assert _body(url) != b"here", f"port {port} serves objects to anyone"


def _body(url: str) -> bytes | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bytes(answer.read())
    except (urllib.error.URLError, ConnectionError, ValueError, OSError):
        return None


def test_servers_run_as_the_ordinary_user_on_loopback_alone(
    config: Config, who: Person, supervisor: Supervisor
) -> None:
    for service in own_services(config, who):
        supervisor.start_service(service)

    for name in ("postgres", "redis", "seaweedfs"):
        status = Path(f"/proc/{supervisor.pid(name)}").stat()
        assert status.st_uid == who.uid, name
    ours = {config.port("POSTGRES_PORT"), config.port("REDIS_PORT"), *s3_ports(config)}
    assert {address for address, port in _listening() if port in ours} == {"0100007F"}


def _listening() -> set[tuple[str, int]]:
    """Return the addresses (hexadecimal) and ports that somebody listens on.

    Source: proc(5), /proc/net/tcp; state 0A is TCP_LISTEN.
    """
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            if state == "0A":
                address, _, port = local.partition(":")
                found.add((address, int(port, 16)))
    return found


def test_a_taken_port_is_named_with_what_to_do(
    config: Config, who: Person, supervisor: Supervisor
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", config.port("REDIS_PORT")))
        taken.listen()

        with pytest.raises(LaunchFailed, match="REDIS_PORT="):
            supervisor.start_service(redis_server(config, who))


def test_no_secret_is_an_argument_of_a_server(
    config: Config, who: Person, supervisor: Supervisor
) -> None:
    for service in own_services(config, who):
        supervisor.start_service(service)

    for name in ("postgres", "redis", "seaweedfs"):
        arguments = Path(f"/proc/{supervisor.pid(name)}/cmdline").read_text()
        for secret in ("POSTGRES_PASSWORD", "REDIS_PASSWORD", "S3_SECRET_ACCESS_KEY"):
            assert config.env[secret] not in arguments


def test_a_leftover_of_a_killed_supervisor_is_replaced(
    config: Config, who: Person, supervisor: Supervisor
) -> None:
    supervisor.start_service(redis_server(config, who))
    left = processes.running(supervisor.pid("redis"))
    assert left is not None

    second = Supervisor(config)
    try:
        second.start_service(redis_server(config, who))
        assert not left.is_alive()
        assert second.pid("redis") != left.pid
    finally:
        second.stop()
