"""The description of a guest, and its part of the host's CPUs."""

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from common.units import GiB, MiB
from hosts.domain_xml import UNBOUND_US, CpuShare, DomainContext, cpu_share, domain_xml
from hosts.hypervisor import Accelerator, cores_for, host_cores, vcpus_for
from tests.hosts.guests import guest_spec

CONTEXT = DomainContext(
    type="qemu",
    network="sktest",
    accelerator="tcg",
    images_dir=Path("/images"),
    config_file=Path("/run/guest/config-1"),
    target="sktest.2",
    qemu_label="libvirt-qemu:kvm",
)
SPEC = guest_spec(Path("/run/guest"))


def described(context: DomainContext = CONTEXT) -> ET.Element:
    return ET.fromstring(domain_xml(SPEC, context))


@pytest.mark.parametrize(
    ("memory_bytes", "cores", "vcpus"),
    [
        (128 * MiB, 0.15, 1),
        (512 * MiB, 0.15, 1),
        (1 * GiB, 0.25, 1),
        (4 * GiB, 1.0, 1),
        (4 * GiB + 1, 1 + 1 / (4 * GiB), 2),
        (16 * GiB, 4.0, 4),
    ],
)
def test_cores_follow_memory(memory_bytes: int, cores: float, vcpus: int) -> None:
    assert cores_for(memory_bytes) == cores
    assert vcpus_for(memory_bytes) == vcpus


@pytest.mark.parametrize(
    ("cores", "vcpus", "accelerator", "given"),
    [
        (0.15, 1, "kvm", 0.15),
        (0.15, 1, "tcg", 1.0),
        (0.05, 1, "tcg", 0.4),
        (1.5, 2, "kvm", 1.5),
        (1.5, 2, "tcg", 2.0),
    ],
)
def test_an_emulated_core_counts_eightfold_up_to_its_vcpus(
    cores: float, vcpus: int, accelerator: Accelerator, given: float
) -> None:
    assert host_cores(cores, vcpus=vcpus, accelerator=accelerator) == pytest.approx(given)


@pytest.mark.parametrize(
    ("cores", "vcpus", "share"),
    [
        (0.15, 1, CpuShare(shares=154, quota_us=7_500)),
        (1.0, 1, CpuShare(shares=1024, quota_us=UNBOUND_US)),
        (1.5, 2, CpuShare(shares=1536, quota_us=37_500)),
        (0.001, 1, CpuShare(shares=2, quota_us=1_000)),
        (None, 2, CpuShare(shares=2048, quota_us=UNBOUND_US)),
        (16.0, 16, CpuShare(shares=10_000, quota_us=UNBOUND_US)),
    ],
)
def test_cores_become_shares_and_a_quota_for_each_vcpu(
    cores: float | None, vcpus: int, share: CpuShare
) -> None:
    assert cpu_share(cores, vcpus=vcpus, accelerator="kvm") == share


def test_memory_is_rounded_down_to_what_was_promised() -> None:
    domain = ET.fromstring(domain_xml(replace(SPEC, memory_bytes=192 * MiB + 1023), CONTEXT))

    assert domain.findtext("memory[@unit='KiB']") == str(192 * 1024)


def test_a_guest_that_is_not_bounded_has_no_quota() -> None:
    bounded = ET.fromstring(
        domain_xml(replace(SPEC, cpu_cores=0.15), replace(CONTEXT, accelerator="kvm"))
    )

    assert bounded.findtext("cputune/quota") == "7500"
    assert described().find("cputune/quota") is None


@pytest.mark.parametrize(
    ("accelerator", "mode"), [("kvm", "host-passthrough"), ("tcg", "maximum")]
)
def test_the_cpu_is_the_best_that_the_accelerator_has(
    accelerator: Accelerator, mode: str
) -> None:
    domain = described(replace(CONTEXT, accelerator=accelerator))

    assert domain.find(f"cpu[@mode='{mode}']") is not None
    assert (domain.find("features/tcg") is not None) == (accelerator == "tcg")


def test_a_failing_disk_pauses_the_guest_and_never_shows_it_an_error() -> None:
    driver = described().find("devices/disk[@type='network']/driver")

    assert driver is not None
    assert driver.get("error_policy") == driver.get("rerror_policy") == "stop"


def test_the_config_is_named_by_its_file_and_is_not_in_the_description() -> None:
    text = domain_xml(replace(SPEC, config=b"a secret"), CONTEXT)

    assert "a secret" not in text
    assert 'name="opt/org.sandkeep/config" file="/run/guest/config-1"' in text


def test_whatever_ends_a_guest_ends_its_domain() -> None:
    for event in ("on_poweroff", "on_reboot", "on_crash"):
        assert described().findtext(event) == "destroy"


def test_a_name_that_people_chose_cannot_break_the_description() -> None:
    name = "</name><devices>\n\x00\x1b" + "x" * 500

    title = ET.fromstring(domain_xml(replace(SPEC, name=name), CONTEXT)).findtext("title")

    assert title is not None
    assert title.startswith("</name><devices>xxx")
    assert len(title) == 100


def test_an_emulated_kernel_is_told_how_fast_its_counter_ticks() -> None:
    known = described(replace(CONTEXT, tsc_khz=2445406)).findtext("os/cmdline", "").split()
    unknown = described(CONTEXT).findtext("os/cmdline", "").split()

    assert {"tsc_early_khz=2445406", "tsc=reliable"} <= set(known)
    assert "clocksource=acpi_pm" in unknown
    assert "tsc=reliable" not in unknown
