"""The libvirt description of a guest. Pure: reads and writes nothing.

Source: https://libvirt.org/formatdomain.html; every element is understood by libvirt 9.0.
"""

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from xml.etree import ElementTree as ET

from common.units import KiB
from hosts.hypervisor import Accelerator, GuestSpec, host_cores

CONFIG_NAME = "opt/org.sandkeep/config"
CHANNEL_NAME = "org.sandkeep.agent"
EXPORT_NAME = "disk"

# One core is 1,024 shares; with cgroup v2 libvirt writes them as a weight, 10,000 at most.
SHARES_PER_CORE = 1024
LEAST_SHARES, MOST_SHARES = 2, 10_000

# The share of a small guest is used up and waited for once a period: half of the kernel's
# usual 100 ms, so that a key typed into a busy guest of 0.15 cores echoes in 43 ms.
PERIOD_US = 50_000
# The kernel takes no quota below a millisecond.
LEAST_QUOTA_US = 1_000
UNBOUND_US = -1

# While the storage daemon restarts, the guest's requests wait this long before QEMU pauses
# it (`error_policy='stop'`). Understood by libvirt 9.0, though its schema forgot it.
RECONNECT_S = 10

# QEMU lets its translated code grow to 1 GiB a guest, none of it the guest's own memory.
TRANSLATION_CACHE_MIB = 128

# What the guest tells of its memory is at most this old.
BALLOON_PERIOD_S = 10

TITLE_CHARACTERS = 100

# A kernel that panics restarts, which ends the domain (`on_reboot`). It need not test its
# ciphers at each boot, nor wait long for other CPUs while it starts.
CMDLINE = (
    "console=ttyS0 panic=-1 quiet net.ifnames=0 random.trust_cpu=on cryptomgr.notests "
    "rcupdate.rcu_expedited=1"
)
# An emulated CPU has no speculation to guard against, and the guards are slow to emulate.
CMDLINE_EMULATED = f"{CMDLINE} mitigations=off no_timer_check"


class Slot(IntEnum):
    """Where devices are on the bus; the kernel names disks in this order."""

    ROOT_DISK = 2
    TOOLKIT = 3
    INTERFACE = 4
    PORTS = 5
    RNG = 6
    BALLOON = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class DomainContext:
    """What all guests of a host share, and where this one's config was put.

    Attributes:
        config_file: the fw_cfg content, readable by the user that QEMU runs as.
        qemu_label: "user:group" that QEMU runs as; None leaves it to libvirt.
        tsc_khz: how fast the host's time stamp counter ticks, where that is known.
    """

    type: str
    network: str
    accelerator: Accelerator
    images_dir: Path
    config_file: Path
    target: str
    qemu_label: str | None
    tsc_khz: int | None = None


@dataclass(frozen=True, slots=True)
class CpuShare:
    """A guest's part of the host's CPUs, in the numbers of the kernel's scheduler.

    `quota_us` is for each vCPU thread and each period; UNBOUND_US means no bound.
    """

    shares: int
    quota_us: int
    period_us: int = PERIOD_US


def cpu_share(cores: float | None, *, vcpus: int, accelerator: Accelerator) -> CpuShare:
    """Turn cores into shares and a quota.

    The quota is set for each vCPU and not for the whole of QEMU, so that a guest that
    burns its share does not hold up its own disk, which QEMU's main thread serves.
    """
    weight = float(vcpus) if cores is None else cores
    shares = max(LEAST_SHARES, min(MOST_SHARES, round(weight * SHARES_PER_CORE)))
    if cores is None:
        return CpuShare(shares, UNBOUND_US)
    bound = host_cores(cores, vcpus=vcpus, accelerator=accelerator)
    if bound >= vcpus:
        return CpuShare(shares, UNBOUND_US)
    return CpuShare(shares, max(LEAST_QUOTA_US, round(PERIOD_US * bound / vcpus)))


def domain_name(network: str, spec: GuestSpec) -> str:
    """Return the name under which libvirt knows a guest."""
    return f"{network}-{spec.uuid.hex}"


def domain_xml(spec: GuestSpec, context: DomainContext) -> str:
    """Return the libvirt description of a guest.

    Memory is rounded down to whole KiB, libvirt's own unit, so that a guest never gets
    more than its host promised. Whatever ends the guest (power off, restart, a panic) ends
    the domain: the platform alone decides what runs again.
    """
    domain = ET.Element("domain", type=context.type)
    _text(domain, "name", domain_name(context.network, spec))
    _text(domain, "uuid", str(spec.uuid))
    title = "".join(mark for mark in spec.name if mark.isprintable())[:TITLE_CHARACTERS]
    if title:
        _text(domain, "title", title)
    _text(domain, "memory", str(spec.memory_bytes // KiB), unit="KiB")
    _text(domain, "vcpu", str(spec.vcpus))
    _add_cpu(domain, spec, context)
    _add_boot(domain, context)
    for event in ("on_poweroff", "on_reboot", "on_crash"):
        _text(domain, event, "destroy")
    devices = ET.SubElement(domain, "devices")
    _add_disks(devices, spec, context)
    _add_interface(devices, spec, context)
    _add_consoles(devices, spec)
    _add_small_devices(devices)
    if context.qemu_label is not None:
        # libvirt is not to change the owner of files that many guests share.
        label = ET.SubElement(domain, "seclabel", type="static", model="dac", relabel="no")
        _text(label, "label", context.qemu_label)
    return ET.tostring(domain, encoding="unicode")


def _add_cpu(domain: ET.Element, spec: GuestSpec, context: DomainContext) -> None:
    share = cpu_share(spec.cpu_cores, vcpus=spec.vcpus, accelerator=context.accelerator)
    tune = ET.SubElement(domain, "cputune")
    _text(tune, "shares", str(share.shares))
    if share.quota_us != UNBOUND_US:
        _text(tune, "period", str(share.period_us))
        _text(tune, "quota", str(share.quota_us))
    if context.accelerator == "kvm":
        ET.SubElement(domain, "cpu", mode="host-passthrough", check="none")
        return
    cpu = ET.SubElement(domain, "cpu", mode="maximum", check="none")
    # Five levels of page tables make every miss of the emulated TLB dearer.
    ET.SubElement(cpu, "feature", policy="disable", name="la57")


def _add_boot(domain: ET.Element, context: DomainContext) -> None:
    system = ET.SubElement(domain, "os")
    # On `pc` the kernel sets up the interrupt of each device by interpreting ACPI tables:
    # 2.1 of 14 s of a boot under emulation, against 0.15 s here.
    _text(system, "type", "hvm", arch="x86_64", machine="q35")
    _text(system, "kernel", str(context.images_dir / "vmlinux"))
    _text(system, "initrd", str(context.images_dir / "initrd.img"))
    emulated = context.accelerator == "tcg"
    _text(system, "cmdline", f"{CMDLINE_EMULATED} {_clock(context)}" if emulated else CMDLINE)

    firmware = ET.SubElement(domain, "sysinfo", type="fwcfg")
    ET.SubElement(firmware, "entry", name=CONFIG_NAME, file=str(context.config_file))

    features = ET.SubElement(domain, "features")
    ET.SubElement(features, "acpi")
    ET.SubElement(features, "apic")
    if emulated:
        tcg = ET.SubElement(features, "tcg")
        _text(tcg, "tb-cache", str(TRANSLATION_CACHE_MIB), unit="MiB")

    clock = ET.SubElement(domain, "clock", offset="utc")
    ET.SubElement(clock, "timer", name="hpet", present="no")


def _clock(context: DomainContext) -> str:
    """Tell an emulated kernel what to take the time from.

    Its counter is the host's. It would measure how fast that ticks, and is wrong by a factor
    of twenty when the host is busy at that moment: all its time then runs so much too fast.
    """
    if context.tsc_khz is None:
        return "clocksource=acpi_pm"
    return f"tsc_early_khz={context.tsc_khz} tsc=reliable"


def _add_disks(devices: ET.Element, spec: GuestSpec, context: DomainContext) -> None:
    root = ET.SubElement(devices, "disk", type="network", device="disk")
    # An error pauses the guest instead of reaching its file system (`rerror_policy`
    # follows for reads).
    ET.SubElement(
        root,
        "driver",
        name="qemu",
        type="raw",
        cache="none",
        discard="unmap",
        error_policy="stop",
        rerror_policy="stop",
    )
    source = ET.SubElement(root, "source", protocol="nbd", name=EXPORT_NAME)
    ET.SubElement(source, "host", transport="unix", socket=str(spec.disk_socket))
    ET.SubElement(source, "reconnect", delay=str(RECONNECT_S))
    ET.SubElement(root, "target", dev="vda", bus="virtio")
    _place(root, Slot.ROOT_DISK)

    toolkit = ET.SubElement(devices, "disk", type="file", device="disk")
    ET.SubElement(toolkit, "driver", name="qemu", type="raw")
    ET.SubElement(toolkit, "source", file=str(context.images_dir / "toolkit.squashfs"))
    ET.SubElement(toolkit, "target", dev="vdb", bus="virtio")
    ET.SubElement(toolkit, "readonly")
    ET.SubElement(toolkit, "shareable")
    _place(toolkit, Slot.TOOLKIT)


def _add_interface(devices: ET.Element, spec: GuestSpec, context: DomainContext) -> None:
    interface = ET.SubElement(devices, "interface", type="network")
    ET.SubElement(interface, "source", network=context.network)
    ET.SubElement(interface, "mac", address=spec.mac)
    ET.SubElement(interface, "target", dev=context.target)
    ET.SubElement(interface, "model", type="virtio")
    ET.SubElement(interface, "port", isolated="yes")
    # No option ROM: the guest never boots from the network.
    ET.SubElement(interface, "rom", enabled="no")
    _place(interface, Slot.INTERFACE)


def _add_consoles(devices: ET.Element, spec: GuestSpec) -> None:
    # virtlogd writes the file, and bounds it (`max_size`, `max_backups`).
    serial = ET.SubElement(devices, "serial", type="file")
    ET.SubElement(serial, "source", path=str(spec.serial_log), append="on")
    ET.SubElement(serial, "target", port="0")

    ports = ET.SubElement(devices, "controller", type="virtio-serial", index="0")
    _place(ports, Slot.PORTS)
    channel = ET.SubElement(devices, "channel", type="unix")
    ET.SubElement(channel, "source", mode="bind", path=str(spec.channel))
    ET.SubElement(channel, "target", type="virtio", name=CHANNEL_NAME)


def _add_small_devices(devices: ET.Element) -> None:
    rng = ET.SubElement(devices, "rng", model="virtio")
    _text(rng, "backend", "/dev/urandom", model="random")
    _place(rng, Slot.RNG)

    balloon = ET.SubElement(
        devices, "memballoon", model="virtio", autodeflate="on", freePageReporting="on"
    )
    ET.SubElement(balloon, "stats", period=str(BALLOON_PERIOD_S))
    _place(balloon, Slot.BALLOON)

    ET.SubElement(devices, "panic", model="isa")
    ET.SubElement(devices, "controller", type="usb", model="none")
    # libvirt gives each machine a screen unless told otherwise.
    video = ET.SubElement(devices, "video")
    ET.SubElement(video, "model", type="none")


def _place(device: ET.Element, slot: Slot) -> None:
    """Put a device on the root bus itself, not behind a port of its own as libvirt would."""
    address = {"domain": "0x0000", "bus": "0x00", "slot": f"{slot:#04x}", "function": "0x0"}
    ET.SubElement(device, "address", {"type": "pci", **address})


def _text(parent: ET.Element, tag: str, text: str, **attributes: str) -> None:
    ET.SubElement(parent, tag, attributes).text = text
