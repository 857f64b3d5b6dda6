"""The servers that a platform on one machine needs: PostgreSQL, Redis, SeaweedFS.

Each is described by a `Service`: what must be on disk before it starts, the program, and
how to see that it truly answers. `supervisor` starts, watches and stops them.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import boto3
import psycopg
import redis
from botocore.config import Config as BotoConfig
from botocore.exceptions import BotoCoreError, ClientError
from psycopg import sql

from launch.config import S3_PORTS, Config, own_file, write_private
from launch.people import Person
from launch.processes import Program
from launch.progress import LaunchFailed

# An object that is always there: after a crash SeaweedFS takes writes seconds before it can
# read what was stored earlier, so only reading an old object tells that it is ready.
CANARY_KEY = "sandkeep-canary"

DURABILITY = ("fsync", "full_page_writes", "synchronous_commit")


@dataclass(frozen=True)
class Service:
    """One server of ours."""

    title: str
    program: Program
    port_names: tuple[str, ...]
    """The settings that hold the ports it listens on, for a message when one is taken."""
    prepare: Callable[[], None]
    """Puts on disk what the program needs. Called before each start; may be repeated."""
    is_ready: Callable[[], bool]
    settle: Callable[[], None]
    """Makes what must be in the server before others use it. May be repeated."""
    ready_timeout_s: float = 60.0


def own_services(config: Config, who: Person) -> list[Service]:
    """Return the servers that nobody gave us the address of, in the order to start them."""
    known = {"postgres": postgres, "redis": redis_server, "s3": seaweedfs}
    return [make(config, who) for name, make in known.items() if config.owns(name)]


# -- PostgreSQL ------------------------------------------------------------------------------


def postgres(config: Config, who: Person) -> Service:
    """Describe our own PostgreSQL cluster, reached by loopback and a socket."""
    data = config.state_dir / "postgres"
    sockets = config.run_dir / "postgres"
    binaries = postgres_binaries()
    options = {
        "listen_addresses": "127.0.0.1",
        "port": config.env["POSTGRES_PORT"],
        "unix_socket_directories": str(sockets),
        # Sixteen worker threads, a pool for each web process, the scheduler, and tests.
        "max_connections": "200",
        "log_line_prefix": "%m [%p] ",
        **dict.fromkeys(DURABILITY, config.env["POSTGRES_DURABLE"]),
    }
    arguments = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
    return Service(
        title="PostgreSQL",
        program=Program(
            name="postgres",
            argv=[str(binaries / "postgres"), "-D", str(data), *arguments],
            env=_plain_environment(),
            runs_as=who,
            # "Fast": ends sessions, rolls back, and writes a checkpoint.
            stop_signal=signal.SIGINT,
            stop_timeout_s=60.0,
        ),
        port_names=("POSTGRES_PORT",),
        prepare=lambda: _prepare_postgres(config, who, data, sockets, binaries),
        is_ready=lambda: _postgres_answers(config),
        settle=lambda: _make_database(config),
    )


def postgres_binaries() -> Path:
    """Return the folder of the newest PostgreSQL server that Debian installed.

    Raises:
        LaunchFailed: there is none.
    """
    folders = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    if not folders:
        raise LaunchFailed("No PostgreSQL server is installed: run bin/bootstrap.")
    return max(folders, key=lambda folder: int(folder.parent.name))


def _prepare_postgres(
    config: Config, who: Person, data: Path, sockets: Path, binaries: Path
) -> None:
    _folder(sockets, who)
    _folder(data, who)
    if (data / "PG_VERSION").exists():
        return
    password_file = config.secret_dir / "postgres_superuser"
    write_private(password_file, config.env["POSTGRES_PASSWORD"] + "\n")
    own_file(password_file, who)
    answer = subprocess.run(
        [
            *(str(binaries / "initdb"), "-D", str(data), "-U", "postgres", "--encoding=UTF8"),
            *("--locale=C.UTF-8", "--auth=scram-sha-256", f"--pwfile={password_file}"),
        ],
        user=who.uid,
        group=who.gid,
        extra_groups=who.groups,
        env=_plain_environment(),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if answer.returncode:
        # A half-made cluster would be refused by every later start.
        shutil.rmtree(data)
        raise LaunchFailed(f"initdb failed:\n{answer.stderr}")


def _connect(config: Config) -> "psycopg.Connection[tuple[object, ...]]":
    return psycopg.connect(
        host="127.0.0.1",
        port=config.port("POSTGRES_PORT"),
        user="postgres",
        password=config.env["POSTGRES_PASSWORD"],
        dbname="postgres",
        connect_timeout=5,
        autocommit=True,
    )


def _postgres_answers(config: Config) -> bool:
    try:
        with _connect(config) as connection:
            connection.execute("SELECT 1")
    except psycopg.OperationalError:
        return False
    return True


def _make_database(config: Config) -> None:
    """Make the platform's role and database; the role may make others, for tests."""
    with _connect(config) as connection:
        role = connection.execute("SELECT 1 FROM pg_roles WHERE rolname = 'sandkeep'")
        if role.fetchone() is None:
            password = sql.Literal(config.env["POSTGRES_PASSWORD"])
            connection.execute(
                sql.SQL("CREATE ROLE sandkeep LOGIN CREATEDB PASSWORD {}").format(password)
            )
        database = connection.execute("SELECT 1 FROM pg_database WHERE datname = 'sandkeep'")
        if database.fetchone() is None:
            connection.execute("CREATE DATABASE sandkeep OWNER sandkeep")


# -- Redis -----------------------------------------------------------------------------------


def redis_server(config: Config, who: Person) -> Service:
    """Describe our own Redis. It keeps nothing: messages are hints, rows are the truth."""
    folder = config.state_dir / "redis"
    settings = folder / "redis.conf"
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if server is None:
        raise LaunchFailed("No Redis server is installed: run bin/bootstrap.")
    return Service(
        title="Redis",
        program=Program(
            name="redis",
            argv=[server, str(settings)],
            env=_plain_environment(),
            runs_as=who,
        ),
        port_names=("REDIS_PORT",),
        prepare=lambda: _prepare_redis(config, who, folder, settings),
        is_ready=lambda: _redis_answers(config),
        settle=lambda: None,
    )


def _prepare_redis(config: Config, who: Person, folder: Path, settings: Path) -> None:
    _folder(folder, who)
    # The password is in a file and not an argument, which every user could read.
    write_private(
        settings,
        f"bind 127.0.0.1\nport {config.env['REDIS_PORT']}\ndir {folder}\n"
        f'requirepass {config.env["REDIS_PASSWORD"]}\nsave ""\nappendonly no\n',
    )
    own_file(settings, who)


def _redis_answers(config: Config) -> bool:
    client = redis.Redis.from_url(config.env["REDIS_URL"], socket_timeout=5)
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
    finally:
        client.close()


# -- SeaweedFS -------------------------------------------------------------------------------


def seaweedfs(config: Config, who: Person) -> Service:
    """Describe our own object store: SeaweedFS in one process.

    Without credentials it would be open to all, it listens on every address unless told
    otherwise, and its filer serves each object to anyone without the keys of security.toml.
    """
    data = config.state_dir / "s3/data"
    settings = config.state_dir / "s3/conf"
    return Service(
        title="SeaweedFS",
        program=Program(
            name="seaweedfs",
            argv=_weed_arguments(config, data, settings),
            env={
                **_plain_environment(),
                "AWS_ACCESS_KEY_ID": config.env["S3_ACCESS_KEY_ID"],
                "AWS_SECRET_ACCESS_KEY": config.env["S3_SECRET_ACCESS_KEY"],
                # Measured: 678 MB after a load without it. At 200MiB it collects five times
                # a second while idle, an eighth of a core; at 512MiB hardly ever.
                "GOMEMLIMIT": "512MiB",
            },
            runs_as=who,
            cwd=config.run_dir,
        ),
        port_names=("S3_PORT",),
        prepare=lambda: _prepare_seaweedfs(config, who, data, settings),
        is_ready=lambda: _store_reads_back(config),
        settle=lambda: None,
    )


def s3_ports(config: Config) -> range:
    """Return every port that SeaweedFS listens on; only the first is meant for others."""
    first = config.port("S3_PORT")
    return range(first, first + S3_PORTS)


def _weed_arguments(config: Config, data: Path, settings: Path) -> list[str]:
    ports = ["s3.port", "master.port", "volume.port", "filer.port", "admin.port"]
    ports += [f"{name}.grpc" for name in ports]
    sockets = config.run_dir / "s3"
    return [
        str(config.venv_bin / "weed"),
        f"-config_dir={settings}",
        "-logtostderr=true",
        "mini",
        f"-dir={data}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        *(f"-{name}={port}" for name, port in zip(ports, s3_ports(config), strict=True)),
        f"-s3.localSocket={sockets}/s3.sock",
        f"-filer.localSocket={sockets}/filer.sock",
        "-webdav=false",
        "-admin.ui=false",
        "-master.telemetry=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.allowDeleteBucketNotEmpty=false",
        "-s3.autoCreateBucket=false",
        # Capped from the free disk otherwise; a nearly full one would refuse the only bucket.
        "-volume.max=400",
    ]


def _prepare_seaweedfs(config: Config, who: Person, data: Path, settings: Path) -> None:
    for folder in (data.parent, data, settings, config.run_dir / "s3"):
        _folder(folder, who)
    security = settings / "security.toml"
    if not security.exists():
        names = ("jwt.signing", "jwt.signing.read", "jwt.filer_signing")
        sections = [
            f'[{name}]\nkey = "{os.urandom(32).hex()}"\n'
            for name in (*names, "jwt.filer_signing.read")
        ]
        write_private(security, "\n".join(sections))
    own_file(security, who)


def _store_reads_back(config: Config) -> bool:
    """Tell whether an object written long ago can be read; write it the first time."""
    client = boto3.client(
        "s3",
        endpoint_url=config.env["S3_ENDPOINT_URL"],
        region_name=config.env["S3_REGION"],
        aws_access_key_id=config.env["S3_ACCESS_KEY_ID"],
        aws_secret_access_key=config.env["S3_SECRET_ACCESS_KEY"],
        config=BotoConfig(
            connect_timeout=2,
            read_timeout=5,
            retries={"total_max_attempts": 1},
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
        ),
    )
    bucket = config.env["S3_BUCKET"]
    marker = config.state_dir / "s3/canary-written"
    try:
        if not marker.exists():
            if bucket not in [entry["Name"] for entry in client.list_buckets()["Buckets"]]:
                client.create_bucket(Bucket=bucket)
            client.put_object(Bucket=bucket, Key=CANARY_KEY, Body=b"here")
        body: bytes = client.get_object(Bucket=bucket, Key=CANARY_KEY)["Body"].read()
    except (BotoCoreError, ClientError):
        return False
    finally:
        client.close()
    marker.touch()
    return body == b"here"


# -- shared ----------------------------------------------------------------------------------


def wait_until_ready(service: Service, *, alive: Callable[[], bool], log: Path) -> None:
    """Wait until a started server answers, then make what others expect in it.

    Raises:
        LaunchFailed: it ended, or did not answer in time.
    """
    until = time.monotonic() + service.ready_timeout_s
    while not service.is_ready():
        if not alive():
            raise LaunchFailed(f"{service.title} ended at once. Its log: {log}")
        if time.monotonic() > until:
            raise LaunchFailed(f"{service.title} does not answer. Its log: {log}")
        time.sleep(0.1)
    service.settle()


def _folder(path: Path, who: Person) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chown(path, who.uid, who.gid)
    path.chmod(0o700)


def _plain_environment() -> dict[str, str]:
    """Return an environment without secrets, and without the caller's PG… or AWS_… settings."""
    return {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "LANG": "C.UTF-8",
        "HOME": "/nonexistent",
    }
