"""What every Hypervisor does, asked of the fake and of libvirt's own test driver.

`test_libvirt_driver.py` asks the same and more of QEMU.
"""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from common.units import MiB
from hosts.errors import GuestMissing
from hosts.hypervisor import GuestSpec, GuestState, Hypervisor, HypervisorConfig
from hosts.libvirt_driver import LibvirtHypervisor
from tests.fakes.hypervisor import FakeHypervisor
from tests.hosts.guests import guest_spec


def opened(kind: str, network: str) -> Hypervisor:
    config = HypervisorConfig(
        uri="test:///default" if kind == "libvirt" else "fake://contract",
        images_dir=Path("/nonexistent"),
        network=network,
        accelerator="tcg",
    )
    return LibvirtHypervisor(config) if kind == "libvirt" else FakeHypervisor(config)


@pytest.fixture(params=["fake", "libvirt"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    FakeHypervisor.reset()


@pytest.fixture
def hypervisor(kind: str) -> Iterator[Hypervisor]:
    with opened(kind, f"sktest{uuid4().hex[:6]}") as hypervisor:
        yield hypervisor


@pytest.fixture
def spec(tmp_path: Path) -> GuestSpec:
    return guest_spec(tmp_path, memory_bytes=256 * MiB)


def test_a_started_guest_runs(hypervisor: Hypervisor, spec: GuestSpec) -> None:
    hypervisor.start(spec)

    assert hypervisor.state(spec.uuid) is GuestState.RUNNING
    assert hypervisor.guests() == [spec.uuid]


def test_starting_twice_is_starting_once(hypervisor: Hypervisor, spec: GuestSpec) -> None:
    hypervisor.start(spec)
    hypervisor.start(spec)

    assert hypervisor.guests() == [spec.uuid]


def test_a_destroyed_guest_is_missing(hypervisor: Hypervisor, spec: GuestSpec) -> None:
    hypervisor.start(spec)
    hypervisor.destroy(spec.uuid)

    assert hypervisor.state(spec.uuid) is GuestState.MISSING
    assert hypervisor.guests() == []


def test_a_destroyed_guest_can_be_started_again(
    hypervisor: Hypervisor, spec: GuestSpec
) -> None:
    hypervisor.start(spec)
    hypervisor.destroy(spec.uuid)
    hypervisor.start(spec)

    assert hypervisor.state(spec.uuid) is GuestState.RUNNING


def test_destroying_a_missing_guest_does_nothing(
    hypervisor: Hypervisor, spec: GuestSpec
) -> None:
    hypervisor.destroy(spec.uuid)

    assert hypervisor.state(spec.uuid) is GuestState.MISSING


def test_what_is_asked_of_a_missing_guest_is_refused(
    hypervisor: Hypervisor, spec: GuestSpec
) -> None:
    with pytest.raises(GuestMissing):
        hypervisor.usage(spec.uuid)
    with pytest.raises(GuestMissing):
        hypervisor.set_cpu_cores(spec.uuid, 1.0)


def test_another_platforms_guest_on_the_same_host_is_missing(
    kind: str, hypervisor: Hypervisor, spec: GuestSpec
) -> None:
    hypervisor.start(spec)

    with opened(kind, f"sktest{uuid4().hex[:6]}") as other:
        assert other.guests() == []
        assert other.state(spec.uuid) is GuestState.MISSING
        other.destroy(spec.uuid)

    assert hypervisor.state(spec.uuid) is GuestState.RUNNING


def test_usage_of_a_running_guest_is_told(hypervisor: Hypervisor, spec: GuestSpec) -> None:
    hypervisor.start(spec)

    usage = hypervisor.usage(spec.uuid)

    assert usage.resident_bytes >= 0
    assert usage.cpu_time_s >= 0


def test_a_host_tells_its_size_and_versions(hypervisor: Hypervisor) -> None:
    facts = hypervisor.facts()

    assert facts.memory_bytes >= 256 * MiB
    assert facts.cpus >= 1
    assert facts.driver_version.count(".") == 2
