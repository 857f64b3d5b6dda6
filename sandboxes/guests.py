"""What a host is told of a sandbox's guest: its shape, its identity, its defaults."""

import json
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from django.conf import settings
from django.utils import timezone

from hosts import local
from hosts.hypervisor import GuestSpec, vcpus_for
from hosts.network import mac_of
from sandboxes.identity import host_key
from sandboxes.models import Sandbox


def guest_spec(sandbox: Sandbox, *, disk_socket: Path) -> GuestSpec:
    """Return the guest that the sandbox is at this generation.

    Its cores are not bounded yet: a boot is ours to pay for, not the customer's.
    """
    assert sandbox.address is not None
    address = IPv4Address(sandbox.address)
    return GuestSpec(
        uuid=sandbox.uuid,
        name=sandbox.id,
        vcpus=vcpus_for(sandbox.memory_bytes),
        cpu_cores=None,
        memory_bytes=sandbox.memory_bytes,
        disk_socket=disk_socket,
        config=json.dumps(guest_config(sandbox)).encode(),
        address=address,
        mac=mac_of(address),
        serial_log=local.serial_log_path(sandbox.uuid),
        channel=local.channel_path(sandbox.uuid),
    )


def guest_config(sandbox: Sandbox) -> dict[str, object]:
    """Return what the guest reads at boot. Holds its private host key: never logged."""
    assert sandbox.host is not None
    subnet = IPv4Network(sandbox.host.subnet)
    gateway = str(subnet.network_address + 1)
    private, _ = host_key(sandbox.uuid, secret=settings.SECRET_KEY)
    return {
        "sandbox_id": sandbox.id,
        "hostname": sandbox.id,
        # As a virtual machine's own: its hypervisor shows it this UUID.
        "machine_id": sandbox.uuid.hex,
        "address": f"{sandbox.address}/{subnet.prefixlen}",
        "gateway": gateway,
        "dns": [gateway],
        "ssh_host_key": private,
        "authorized_keys": [settings.PLATFORM_PUBLIC_KEY],
        "env": sandbox.env_vars,
        "disk_limit_bytes": sandbox.team.disk_limit_bytes,
        "generation": sandbox.runtime_generation,
        "boot_unix_s": timezone.now().timestamp(),
    }


def public_host_key(sandbox: Sandbox) -> str:
    """Return the key that the guest shows, for the platform to pin."""
    _, public = host_key(sandbox.uuid, secret=settings.SECRET_KEY)
    return public
