import base64
import ipaddress
import shlex
import socket
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from launch.config import (
    Config,
    configure,
    format_env,
    load,
    prepare_folders,
    read_env,
    write_private,
)
from launch.people import Person
from launch.ports import free_block
from launch.progress import LaunchFailed


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_second_start_settles_the_same(state_dir: Path) -> None:
    first = configure({"PORT_BASE": "24500"}, state_dir=state_dir)
    written_at = (state_dir / "env").stat().st_mtime_ns

    second = configure({}, state_dir=state_dir)

    assert second.env == first.env
    assert (state_dir / "env").stat().st_mtime_ns == written_at


def test_what_a_caller_sets_wins_and_is_kept(state_dir: Path) -> None:
    configure({}, state_dir=state_dir)

    configure({"WEB_PORT": "24999"}, state_dir=state_dir)
    later = configure({"WEB_PORT": ""}, state_dir=state_dir)

    assert later.env["WEB_PORT"] == "24999"
    assert later.env["PUBLIC_URL"] == "http://127.0.0.1:24999"


def test_a_given_public_url_outlives_another_port(state_dir: Path) -> None:
    configure({"PUBLIC_URL": "https://keep.example"}, state_dir=state_dir)

    later = configure({"WEB_PORT": "24998"}, state_dir=state_dir)

    assert later.env["PUBLIC_URL"] == "https://keep.example"


def test_two_checkouts_share_no_name_and_no_port(state_dir: Path) -> None:
    one = configure({}, state_dir=state_dir / "one")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", one.port("WEB_PORT")))
        taken.listen()
        other = configure({}, state_dir=state_dir / "other")

    for name in ("RUN_DIR", "GUEST_NETWORK", "GUEST_BRIDGE", "SECRET_KEY", "GATE_PUBLIC_KEY"):
        assert one.env[name] != other.env[name], name
    assert one.env["WEB_PORT"] != other.env["WEB_PORT"]


def test_a_bridge_and_a_network_fit_the_kernel(config: Config) -> None:
    assert len(config.env["GUEST_BRIDGE"]) <= 15
    assert ipaddress.ip_network(config.env["GUEST_SUBNET"]).prefixlen == 20


def test_secrets_are_for_their_owner_alone(config: Config, who: Person) -> None:
    prepare_folders(config)

    assert mode(config.state_dir / "env") == 0o600
    assert mode(config.secret_dir) == 0o711
    platform_key = Path(config.env["PLATFORM_KEY_FILE"])
    gate_key = Path(config.env["GATE_KEY_FILE"])
    assert (mode(platform_key), platform_key.stat().st_uid) == (0o600, who.uid)
    assert (mode(gate_key), gate_key.stat().st_uid) == (0o600, 0)


def test_the_master_key_is_made_once_and_is_its_owners_alone(state_dir: Path) -> None:
    path = Path(configure({}, state_dir=state_dir).env["MASTER_KEY_FILE"])
    key = path.read_text()
    configure({}, state_dir=state_dir)

    assert path.stat().st_mode & 0o777 == 0o600
    assert len(base64.b64decode(key)) == 32
    assert path.read_text() == key


def test_a_given_master_key_is_used_and_none_is_made(state_dir: Path) -> None:
    config = configure({"MASTER_KEY_CLASS": "vault.Kms"}, state_dir=state_dir)

    assert "MASTER_KEY_FILE" not in config.env
    assert not (state_dir / "secrets/master_key").exists()


def test_keys_are_what_their_public_halves_say(config: Config) -> None:
    for name in ("PLATFORM", "GATE"):
        key = load_ssh_private_key(Path(config.env[f"{name}_KEY_FILE"]).read_bytes(), None)
        assert config.env[f"{name}_PUBLIC_KEY"].startswith("ssh-ed25519 ")
        assert type(key).__name__ == "Ed25519PrivateKey"


def test_secrets_are_not_shown(config: Config) -> None:
    assert config.env["SECRET_KEY"] not in repr(config)


def test_a_given_database_is_used_and_no_other_is_started(state_dir: Path) -> None:
    url = "postgres://someone:secret@db.example/keep"

    config = configure({"DATABASE_URL": url}, state_dir=state_dir)

    assert config.env["DATABASE_URL"] == url
    assert not config.owns("postgres")
    assert config.owns("redis")
    assert not configure({}, state_dir=state_dir).owns("postgres")


def test_our_own_address_given_back_is_no_choice(config: Config) -> None:
    again = configure({"DATABASE_URL": config.env["DATABASE_URL"]}, state_dir=config.state_dir)

    assert again.owns("postgres")


def test_a_given_object_store_needs_its_keys(state_dir: Path) -> None:
    with pytest.raises(LaunchFailed, match="S3_ACCESS_KEY_ID"):
        configure({"S3_ENDPOINT_URL": "https://s3.example"}, state_dir=state_dir)


@pytest.mark.parametrize(
    ("name", "value"),
    [("WEB_PORT", "http"), ("RUN_DIR", "/run/" + "x" * 50), ("GUEST_BRIDGE", "b" * 16)],
)
def test_a_value_that_cannot_work_is_refused_by_name(
    state_dir: Path, name: str, value: str
) -> None:
    with pytest.raises(LaunchFailed, match=name):
        configure({name: value}, state_dir=state_dir)


def test_nothing_can_be_loaded_before_a_start(state_dir: Path) -> None:
    with pytest.raises(LaunchFailed, match="bin/up"):
        load({"STATE_DIR": str(state_dir)})


def test_the_file_reads_the_same_for_us_and_for_a_shell(state_dir: Path) -> None:
    values = {"A": "plain", "B": "two words", "C": 'qu\'ote "d" $HOME `id`', "D": ""}
    write_private(state_dir / "env", format_env(values))

    assert read_env(state_dir / "env") == values
    script = f'. {shlex.quote(str(state_dir / "env"))}; printf %s "$C"'
    answer = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout == values["C"]


def test_a_taken_port_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.listen()

        assert free_block(port) > port
