"""The libvirt driver: a host that does not answer, and real guests under QEMU."""

import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Network
from pathlib import Path
from uuid import uuid4

import pytest

from common.units import MiB
from hosts.errors import GuestNotStarted, HostUnreachable
from hosts.hypervisor import GuestSpec, GuestState, HypervisorConfig
from hosts.libvirt_driver import LibvirtHypervisor
from hosts.network import (
    NetworkConfig,
    addresses,
    ensure_network,
    free_subnet,
    mac_of,
    remove_network,
)
from tests.hosts.guests import guest_spec
from tests.hosts.machine import need_libvirt, wait_for
from tests.hosts.tiny_guest import NbdDisk, build_images

BOOT_S = 60.0


def config(uri: str, **changes: float) -> HypervisorConfig:
    described = HypervisorConfig(
        uri=uri, images_dir=Path("/nonexistent"), network="sktest", accelerator="tcg"
    )
    return dataclasses.replace(described, **changes)  # type: ignore[arg-type]


def test_a_daemon_that_is_not_there_is_unreachable() -> None:
    hypervisor = LibvirtHypervisor(config("qemu+unix:///system?socket=/nonexistent"))

    with pytest.raises(HostUnreachable):
        hypervisor.state(uuid4())


@pytest.fixture
def deaf_daemon() -> Iterator[str]:
    """A socket that takes connections and never says a word."""
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(f"{directory}/sock")
        deaf.listen(64)
        yield f"qemu+unix:///system?socket={directory}/sock"


def test_a_daemon_that_does_not_answer_is_given_up(deaf_daemon: str) -> None:
    hypervisor = LibvirtHypervisor(config(deaf_daemon, call_timeout_s=0.3))
    began = time.monotonic()

    with pytest.raises(HostUnreachable, match=r"no answer within 0\.3 s"):
        hypervisor.guests()

    assert time.monotonic() - began < 3


def test_calls_that_hang_do_not_pile_up(
    deaf_daemon: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hosts.libvirt_driver.MOST_STUCK_CALLS", 2)
    hypervisor = LibvirtHypervisor(config(deaf_daemon, call_timeout_s=0.1))

    for _ in range(2):
        with pytest.raises(HostUnreachable, match="no answer"):
            hypervisor.guests()

    with pytest.raises(HostUnreachable, match="too many calls"):
        hypervisor.guests()


def test_a_mac_that_is_not_its_addresss_is_a_bug(tmp_path: Path) -> None:
    spec = dataclasses.replace(guest_spec(tmp_path), mac="52:54:00:00:00:01")

    with pytest.raises(ValueError, match="does not carry"):
        LibvirtHypervisor(config("test:///default")).start(spec)


@pytest.fixture(scope="module")
def network() -> Iterator[NetworkConfig]:
    need_libvirt()
    described = NetworkConfig(
        name=f"sktest{uuid4().hex[:6]}",
        bridge=f"skt{uuid4().hex[:8]}",
        subnet=free_subnet(IPv4Network(f"10.200.{third}.0/24") for third in range(256)),
    )
    ensure_network(described)
    yield described
    remove_network(described)


@pytest.fixture(scope="module")
def images() -> Iterator[Path]:
    need_libvirt()
    # Not pytest's own folder: QEMU's user may not pass through that.
    directory = Path(tempfile.mkdtemp(prefix="sktest-images-"))
    directory.chmod(0o755)
    build_images(directory)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def directory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="sktest-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def disk(directory: Path) -> Iterator[NbdDisk]:
    with NbdDisk(directory) as disk:
        yield disk


@pytest.fixture
def qemu(network: NetworkConfig, images: Path) -> Iterator[LibvirtHypervisor]:
    described = HypervisorConfig(
        uri="qemu:///system", images_dir=images, network=network.name, accelerator="tcg"
    )
    with LibvirtHypervisor(described) as hypervisor:
        yield hypervisor
        for uuid in hypervisor.guests():
            hypervisor.destroy(uuid)


def spec_for(
    network: NetworkConfig, directory: Path, order: str, cores: float | None = None
) -> GuestSpec:
    address = addresses(network.subnet).address(0)
    spec = guest_spec(directory, config=order.encode(), address=address, cpu_cores=cores)
    assert spec.mac == mac_of(address)
    return spec


def serial(spec: GuestSpec) -> str:
    return spec.serial_log.read_text(errors="replace") if spec.serial_log.exists() else ""


def boot(qemu: LibvirtHypervisor, spec: GuestSpec) -> None:
    qemu.start(spec)
    assert wait_for(lambda: "MAC=" in serial(spec), timeout_s=BOOT_S), serial(spec)


def qemu_pid(spec: GuestSpec) -> int:
    found = subprocess.run(
        ["pgrep", "-f", f"guest=[^,]*{spec.uuid.hex}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(found.stdout)


@pytest.mark.guest
def test_a_guest_boots_with_its_config_disks_and_mac(
    qemu: LibvirtHypervisor, network: NetworkConfig, directory: Path, disk: NbdDisk
) -> None:
    spec = spec_for(network, directory, "a secret")

    boot(qemu, spec)

    assert "CONFIG=a secret" in serial(spec)
    assert "DISKS=vda vdb" in serial(spec)
    assert f"MAC={spec.mac}" in serial(spec)
    assert list(spec.channel.parent.iterdir()) == [spec.channel]
    assert "libvirt-qemu" in Path(f"/proc/{qemu_pid(spec)}").owner()
    assert qemu.usage(spec.uuid).resident_bytes > 32 * MiB


@pytest.mark.guest
def test_the_agents_second_door_carries_lines_both_ways(
    qemu: LibvirtHypervisor, network: NetworkConfig, directory: Path, disk: NbdDisk
) -> None:
    spec = spec_for(network, directory, "echo")
    boot(qemu, spec)

    with socket.socket(socket.AF_UNIX) as door:
        door.settimeout(20)
        door.connect(str(spec.channel))
        door.sendall(b"hello\n")

        assert door.makefile("rb").readline() == b"got hello\n"


@pytest.mark.guest
@pytest.mark.parametrize("end", ["poweroff", "panic"])
def test_a_guest_that_ends_by_itself_leaves_nothing(
    end: str, qemu: LibvirtHypervisor, network: NetworkConfig, directory: Path, disk: NbdDisk
) -> None:
    spec = spec_for(network, directory, end)
    qemu.start(spec)

    assert wait_for(lambda: qemu.guests() == [], timeout_s=BOOT_S)

    assert f"CONFIG={end}" in serial(spec)
    assert qemu.state(spec.uuid) is GuestState.MISSING


@pytest.mark.guest
def test_a_killed_qemu_is_seen_at_once(
    qemu: LibvirtHypervisor, network: NetworkConfig, directory: Path, disk: NbdDisk
) -> None:
    spec = spec_for(network, directory, "")
    qemu.start(spec)

    os.kill(qemu_pid(spec), signal.SIGKILL)

    assert wait_for(lambda: qemu.state(spec.uuid) is GuestState.MISSING, timeout_s=5)


@pytest.mark.guest
def test_started_by_many_at_once_it_is_one_guest(
    qemu: LibvirtHypervisor, network: NetworkConfig, directory: Path, disk: NbdDisk
) -> None:
    spec = spec_for(network, directory, "")

    with ThreadPoolExecutor(8) as callers:
        for started in [callers.submit(qemu.start, spec) for _ in range(8)]:
            started.result()

    assert qemu.guests() == [spec.uuid]
    assert qemu_pid(spec) > 0


@pytest.mark.guest
def test_a_guest_whose_disk_does_not_answer_is_not_started(
    qemu: LibvirtHypervisor, network: NetworkConfig, directory: Path
) -> None:
    spec = spec_for(network, directory, "a secret")

    with pytest.raises(GuestNotStarted) as refused:
        qemu.start(spec)

    assert "disk.sock" in refused.value.reason
    assert str(directory) not in str(refused.value)
    assert qemu.state(spec.uuid) is GuestState.MISSING
    assert not list(spec.channel.parent.glob("config-*"))


@pytest.mark.guest
def test_a_guest_waits_for_a_dead_disk_and_goes_on_with_it(
    qemu: LibvirtHypervisor, network: NetworkConfig, directory: Path, disk: NbdDisk
) -> None:
    spec = spec_for(network, directory, "read")
    boot(qemu, spec)
    assert wait_for(lambda: "READ" in serial(spec), timeout_s=20)

    disk.stop()
    halted = wait_for(lambda: qemu.state(spec.uuid) is GuestState.HALTED, timeout_s=40)
    reads = serial(spec).count("READ")
    disk.serve()
    qemu.start(spec)

    assert halted
    assert qemu.state(spec.uuid) is GuestState.RUNNING
    assert wait_for(lambda: serial(spec).count("READ") > reads, timeout_s=30)
    assert "FAILED" not in serial(spec)


@pytest.mark.guest
def test_a_guest_is_held_to_its_cores_while_it_runs(
    qemu: LibvirtHypervisor, network: NetworkConfig, directory: Path, disk: NbdDisk
) -> None:
    spec = spec_for(network, directory, "spin")
    boot(qemu, spec)

    qemu.set_cpu_cores(spec.uuid, 0.025)
    time.sleep(0.5)
    used = [qemu.usage(spec.uuid).cpu_time_s]
    time.sleep(3)
    used.append(qemu.usage(spec.uuid).cpu_time_s)

    # An emulated core counts eightfold: 0.2 of the host's.
    assert 0.1 < used[1] - used[0] < 0.9


@pytest.mark.guest
def test_the_serial_log_is_bounded(
    qemu: LibvirtHypervisor, network: NetworkConfig, directory: Path, disk: NbdDisk
) -> None:
    spec = spec_for(network, directory, "flood")
    older = spec.serial_log.with_name(f"{spec.serial_log.name}.0")

    boot(qemu, spec)

    assert wait_for(older.exists, timeout_s=120)
    qemu.destroy(spec.uuid)
    kept = sum(path.stat().st_size for path in spec.serial_log.parent.iterdir())
    assert kept <= 5 * 2 * MiB
