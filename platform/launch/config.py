"""What this checkout's platform is called, where it listens, and its secrets.

The answers are found once and kept in `<state>/env`, a file of `NAME=value` lines that a shell
can read too; later starts use what it says. A variable that the caller sets wins, and is
kept in turn. Secrets are generated here and nowhere else.
"""

import base64
import hashlib
import ipaddress
import json
import os
import secrets
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
)

from launch.people import Person, ensure_person, let_through
from launch.ports import free_block
from launch.progress import LaunchFailed

CHECKOUT = Path(__file__).resolve().parents[2]

# Which server each of these addresses, when given, makes unnecessary.
ADDRESS_OF = {"postgres": "DATABASE_URL", "redis": "REDIS_URL", "s3": "S3_ENDPOINT_URL"}

# SeaweedFS has one public port and nine that only it uses itself; they follow S3_PORT.
S3_PORTS = 10
PREFERRED_PORTS = {
    "WEB_PORT": 8000,
    "GATE_PORT": 8022,
    "POSTGRES_PORT": 5442,
    "REDIS_PORT": 6389,
    "S3_PORT": 8340,
}
PLAIN_DEFAULTS = {
    "ALLOWED_HOSTS": "127.0.0.1,localhost",
    "CACHE_BUDGET_BYTES": str(10 * 1024**3),
    "CLUSTER_KEY": "c1",
    "DEBUG": "false",
    # Mail goes to the log and to MAIL_FILE until a real server is named.
    "EMAIL_BACKEND": "common.mail.ConsoleAndFileBackend",
    "DISK_USER": "sandkeep-disk",
    "GATE_HOST": "127.0.0.1",
    "HOST_NAME": "local",
    "LOG_BUDGET_BYTES": str(2 * 1024**3),
    # "off" is for tests: PostgreSQL then trusts that no power cut comes.
    "POSTGRES_DURABLE": "on",
    "REGION_ID": "local",
    "S3_BUCKET": "sandkeep",
    "S3_PREFIX": "",
    "S3_REGION": "us-east-1",
    "SANDKEEP_USER": "sandkeep",
    "SOCKET_GROUP": "libvirt-qemu",
}
SETTABLE = frozenset(
    {*ADDRESS_OF.values(), *PREFERRED_PORTS, *PLAIN_DEFAULTS}
    | {"S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY", "SECRET_KEY", "PUBLIC_URL", "RUN_DIR"}
    | {"MASTER_KEY_FILE", "MASTER_KEY_CLASS", "MASTER_KEY_FILE_PREVIOUS"}
    | {"GUEST_NETWORK", "GUEST_BRIDGE", "GUEST_SUBNET", "MAIL_FILE", "IMAGES_DIR"}
)
# Who keeps the key of all disks; by default a file of ours. Losing it is losing them.
MASTER_KEY_NAMES = ("MASTER_KEY_FILE", "MASTER_KEY_CLASS")

# A UNIX socket's path holds at most 107 bytes; what we add below it needs about 60.
RUN_DIR_MAX_BYTES = 40
# Sandboxes' networks are taken from here: /20s of a range that few sites use.
GUEST_RANGE = ipaddress.IPv4Network("10.64.0.0/10")


@dataclass(frozen=True)
class Config:
    """One platform on this machine."""

    checkout: Path
    state_dir: Path
    env: Mapping[str, str] = field(repr=False)
    """What `<state>/env` holds. It has secrets: never logged."""

    @property
    def run_dir(self) -> Path:
        return Path(self.env["RUN_DIR"])

    @property
    def log_dir(self) -> Path:
        return self.state_dir / "log"

    @property
    def pid_dir(self) -> Path:
        return self.state_dir / "pids"

    @property
    def secret_dir(self) -> Path:
        return self.state_dir / "secrets"

    @property
    def images_dir(self) -> Path:
        return Path(self.env["IMAGES_DIR"])

    @property
    def venv_bin(self) -> Path:
        return self.checkout / "var/venv/bin"

    @property
    def python(self) -> str:
        return str(self.venv_bin / "python")

    def owns(self, service: str) -> bool:
        """Tell whether we run this server ourselves; else its address was given."""
        return service in self.env["OWN_SERVICES"].split()

    def port(self, name: str) -> int:
        return int(self.env[name])

    def environment(self, who: Person | None = None) -> dict[str, str]:
        """Return the whole environment of a process of ours."""
        home = "/root" if who is None else "/nonexistent"
        return {
            **os.environ,
            "HOME": home,
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
            "DJANGO_SETTINGS_MODULE": "config.settings",
            **self.env,
        }


def configure(
    given: Mapping[str, str], *, state_dir: Path | None = None, checkout: Path = CHECKOUT
) -> Config:
    """Settle every name, port and secret of a platform, and keep them in its state folder.

    Calling it again changes nothing but what `given` changes.

    Args:
        given: the caller's environment; empty values count as not set.
        state_dir: where all state lies; by default STATE_DIR, or var/ of the checkout.

    Raises:
        LaunchFailed: a given value can't work; the text says which.
    """
    state_dir = (state_dir or Path(given.get("STATE_DIR") or checkout / "var")).resolve()
    state_dir.mkdir(parents=True, exist_ok=True)
    saved = read_env(state_dir / "env")
    chosen = {name: given[name] for name in SETTABLE if given.get(name)}

    values = {**PLAIN_DEFAULTS, **saved, **chosen, "STATE_DIR": str(state_dir)}
    values["OWN_SERVICES"] = " ".join(_own_services(saved, chosen))
    _settle_names(values, state_dir)
    _settle_ports(values, preferred_base=given.get("PORT_BASE"))
    _settle_secrets(values)
    _settle_addresses(values, saved, chosen)
    _settle_keys(values, state_dir / "secrets")
    if values != saved:
        write_private(state_dir / "env", format_env(values))
    return Config(checkout, state_dir, values)


def load(given: Mapping[str, str], *, checkout: Path = CHECKOUT) -> Config:
    """Return what an earlier start settled, unchanged.

    Raises:
        LaunchFailed: there was none.
    """
    state_dir = Path(given.get("STATE_DIR") or checkout / "var").resolve()
    values = read_env(state_dir / "env")
    if "OWN_SERVICES" not in values:
        raise LaunchFailed("Nothing was ever started here: run bin/up first.")
    # An older version may have written it, without what has a default now.
    return Config(checkout, state_dir, {**PLAIN_DEFAULTS, **values})


def prepare_folders(config: Config) -> Person:
    """Make the users and folders that the processes need; return the ordinary user."""
    who = ensure_person(config.env["SANDKEEP_USER"])
    disk = ensure_person(config.env["DISK_USER"], groups=(config.env["SOCKET_GROUP"],))
    static = config.state_dir / "static"
    for folder in (config.log_dir, config.pid_dir, config.images_dir, config.run_dir, static):
        folder.mkdir(parents=True, exist_ok=True)
    for folder in (config.checkout / "var", config.state_dir):
        let_through(folder, who)
    let_through(config.images_dir, ensure_person("libvirt-qemu"))
    # nbdkit, as this user, loads our packages and keeps its cache in the state folder.
    let_through(config.venv_bin, disk)
    let_through(config.state_dir, disk)

    own_file(Path(config.env["PLATFORM_KEY_FILE"]), who)
    mail = Path(config.env["MAIL_FILE"])
    mail.touch(mode=0o600)
    own_file(mail, who)
    return who


def own_file(path: Path, who: Person) -> None:
    """Give a file to a user who alone may read it."""
    os.chown(path, who.uid, who.gid)
    path.chmod(0o600)


def read_env(path: Path) -> dict[str, str]:
    """Return the variables of an env file; none if it does not exist."""
    try:
        words = shlex.split(path.read_text(), comments=True)
    except FileNotFoundError:
        return {}
    pairs = (word.partition("=") for word in words)
    return {name: value for name, _, value in pairs}


def format_env(values: Mapping[str, str]) -> str:
    """Return the variables as lines that `read_env` and a shell understand."""
    lines = [f"{name}={shlex.quote(value)}\n" for name, value in sorted(values.items())]
    return "# Written by bin/up. Stop the platform before you change a value.\n" + "".join(
        lines
    )


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".new")
    unfinished.unlink(missing_ok=True)
    # Created with its mode: between a write and a chmod others could open it.
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    unfinished.replace(path)


def _own_services(saved: Mapping[str, str], chosen: Mapping[str, str]) -> list[str]:
    """Return the servers that we run: those whose address nobody gave, now or before.

    A caller that has read our own env file gives our own address back: that is no choice.
    """
    before = saved.get("OWN_SERVICES", " ".join(ADDRESS_OF)).split()
    return [
        name
        for name, address in ADDRESS_OF.items()
        if chosen.get(address, saved.get(address)) == saved.get(address) and name in before
    ]


def _settle_names(values: dict[str, str], state_dir: Path) -> None:
    """Name what is shared by the whole machine after this state folder."""
    mark = hashlib.sha256(str(state_dir).encode()).hexdigest()[:8]
    values.setdefault("RUN_DIR", f"/run/sandkeep-{mark}")
    values.setdefault("GUEST_NETWORK", f"sk-{mark}")
    values.setdefault("GUEST_BRIDGE", f"sk{mark}")
    values.setdefault("MAIL_FILE", str(state_dir / "log/mail.log"))
    values.setdefault("IMAGES_DIR", str(state_dir / "images"))
    if "GUEST_SUBNET" not in values:
        values["GUEST_SUBNET"] = str(_free_subnet(int(mark, 16), _networks_in_use()))
    if len(values["RUN_DIR"].encode()) > RUN_DIR_MAX_BYTES:
        raise LaunchFailed(f"RUN_DIR={values['RUN_DIR']} is too long for the sockets in it.")
    if len(values["GUEST_BRIDGE"]) > 15:  # noqa: PLR2004 - the kernel's IFNAMSIZ - 1
        raise LaunchFailed(f"GUEST_BRIDGE={values['GUEST_BRIDGE']} has more than 15 letters.")


def _networks_in_use() -> list[ipaddress.IPv4Network]:
    """Return where this machine already sends packets, its own addresses included."""
    answer = subprocess.run(
        ["ip", "-j", "-4", "route", "show", "table", "all"],
        check=True,
        capture_output=True,
        timeout=10,
    )
    routes = [route["dst"] for route in json.loads(answer.stdout or b"[]")]
    return [ipaddress.IPv4Network(dst, strict=False) for dst in routes if dst != "default"]


def _free_subnet(seed: int, used: list[ipaddress.IPv4Network]) -> ipaddress.IPv4Network:
    """Return a /20 that overlaps none in use, the same for the same seed while it is free."""
    candidates = list(GUEST_RANGE.subnets(new_prefix=20))
    for attempt in range(len(candidates)):
        candidate = candidates[(seed + attempt) % len(candidates)]
        if not any(candidate.overlaps(network) for network in used):
            return candidate
    raise LaunchFailed("Every guest network is in use: set GUEST_SUBNET to a free /20.")


def _settle_ports(values: dict[str, str], *, preferred_base: str | None) -> None:
    for name in PREFERRED_PORTS:
        if not values.get(name, "1").isdecimal():
            raise LaunchFailed(f"{name}={values[name]!r}: write a port number.")
    taken = {int(values[name]) for name in PREFERRED_PORTS if name in values}
    for offset, (name, usual) in enumerate(PREFERRED_PORTS.items()):
        if name in values:
            continue
        preferred = int(preferred_base) + offset if preferred_base else usual
        size = S3_PORTS if name == "S3_PORT" else 1
        port = free_block(preferred, size=size, avoid=frozenset(taken))
        taken.update(range(port, port + size))
        values[name] = str(port)


def _settle_secrets(values: dict[str, str]) -> None:
    values.setdefault("SECRET_KEY", secrets.token_urlsafe(48))
    values.setdefault("POSTGRES_PASSWORD", secrets.token_urlsafe(24))
    values.setdefault("REDIS_PASSWORD", secrets.token_urlsafe(24))
    if "s3" in values["OWN_SERVICES"].split():
        values.setdefault("S3_ACCESS_KEY_ID", "SK" + secrets.token_hex(9).upper())
        values.setdefault("S3_SECRET_ACCESS_KEY", secrets.token_urlsafe(30))


def _settle_addresses(
    values: dict[str, str], saved: Mapping[str, str], chosen: Mapping[str, str]
) -> None:
    own = values["OWN_SERVICES"].split()
    if "postgres" in own:
        login = f"sandkeep:{values['POSTGRES_PASSWORD']}"
        values["DATABASE_URL"] = (
            f"postgres://{login}@127.0.0.1:{values['POSTGRES_PORT']}/sandkeep"
        )
    if "redis" in own:
        login = f":{values['REDIS_PASSWORD']}"
        values["REDIS_URL"] = f"redis://{login}@127.0.0.1:{values['REDIS_PORT']}/0"
    if "s3" in own:
        values["S3_ENDPOINT_URL"] = f"http://127.0.0.1:{values['S3_PORT']}"
    elif not (values.get("S3_ACCESS_KEY_ID") and values.get("S3_SECRET_ACCESS_KEY")):
        raise LaunchFailed(
            "S3_ENDPOINT_URL is given: set S3_ACCESS_KEY_ID and S3_SECRET_ACCESS_KEY too."
        )
    before = f"http://127.0.0.1:{saved.get('WEB_PORT')}"
    if "PUBLIC_URL" not in chosen and saved.get("PUBLIC_URL", before) == before:
        values["PUBLIC_URL"] = f"http://127.0.0.1:{values['WEB_PORT']}"


def _settle_keys(values: dict[str, str], folder: Path) -> None:
    # Others may pass, to reach the one file that is theirs, and can list nothing.
    folder.mkdir(mode=0o711, parents=True, exist_ok=True)
    folder.chmod(0o711)
    for name in ("PLATFORM", "GATE"):
        path = folder / f"{name.lower()}_key"
        values[f"{name}_KEY_FILE"] = str(path)
        values[f"{name}_PUBLIC_KEY"] = _ensure_key(path)
    if not any(values.get(name) for name in MASTER_KEY_NAMES):
        path = folder / "master_key"
        if not path.exists():
            write_private(path, base64.b64encode(secrets.token_bytes(32)).decode() + "\n")
        values["MASTER_KEY_FILE"] = str(path)


def _ensure_key(path: Path) -> str:
    """Return the public half of the key in this file, made first if it is missing."""
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except FileNotFoundError:
        key = Ed25519PrivateKey.generate()
        private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        write_private(path, private.decode())
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
