"""Drives a host through libvirt.

Guests are transient domains: one that ends, however it ends, leaves nothing behind, and
its UUID makes a second start find the first.

Source: https://libvirt.org/html/libvirt-libvirt-domain.html
"""

import grp
import logging
import os
import pwd
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar
from uuid import UUID

import libvirt

from common.units import KiB, MiB
from hosts.domain_xml import CpuShare, DomainContext, cpu_share, domain_xml
from hosts.errors import GuestMissing, GuestNotStarted, HostUnreachable
from hosts.hypervisor import (
    GuestSpec,
    GuestState,
    GuestUsage,
    HostFacts,
    HypervisorConfig,
)
from hosts.network import mac_of, tap_of
from hosts.tsc import tsc_khz

log = logging.getLogger(__name__)

T = TypeVar("T")

# The daemon or the way to it is broken, rather than the request.
UNREACHABLE = frozenset(
    {
        libvirt.VIR_ERR_NO_CONNECT,
        libvirt.VIR_ERR_INVALID_CONN,
        libvirt.VIR_ERR_RPC,
        # "cannot acquire state change lock": another call on this guest hangs.
        libvirt.VIR_ERR_OPERATION_TIMEOUT,
    }
)
# Said of many things; of the connection only when its RPC layer says so: "Failed to connect
# socket", "client socket is closed".
UNREACHABLE_BY_RPC = frozenset({libvirt.VIR_ERR_SYSTEM_ERROR, libvirt.VIR_ERR_INTERNAL_ERROR})

# A daemon that does not answer for this long has its connections closed, and what waits
# for it fails.
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_COUNT = 3

# QEMU looks for a lost NBD server at intervals that grow to 16 s.
RESUME_TIMEOUT_S = 25.0
RESUME_STEP_S = 0.5

# Calls that hang keep a thread each until the connection is closed; beyond this many a
# host is not asked any more.
MOST_STUCK_CALLS = 32

ALL_CELLS = libvirt.VIR_NODE_MEMORY_STATS_ALL_CELLS

CONFIG_PREFIX = "config-"


class LibvirtHypervisor:
    """One libvirt daemon, connected to when first asked and again after it went away."""

    def __init__(self, config: HypervisorConfig) -> None:
        self.config = config
        self._connection: libvirt.virConnect | None = None
        self._connecting = threading.Lock()
        self._stuck = threading.BoundedSemaphore(MOST_STUCK_CALLS)
        self._told_of_cputune = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; guests run on. The next call opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            # Closing asks the daemon too; a hung one is left to the keepalive.
            threading.Thread(target=_close, args=(connection,), daemon=True).start()

    def start(self, spec: GuestSpec) -> None:
        if spec.mac != mac_of(spec.address):
            raise ValueError(f"The network does not carry {spec.mac} at {spec.address}.")
        self._ask(lambda connection: self._start(connection, spec), self.config.start_timeout_s)

    def destroy(self, uuid: UUID) -> None:
        self._ask(lambda connection: self._destroy(connection, uuid))

    def state(self, uuid: UUID) -> GuestState:
        return self._ask(lambda connection: self._state(connection, uuid))

    def guests(self) -> list[UUID]:
        return self._ask(self._guests)

    def set_cpu_cores(self, uuid: UUID, cores: float | None) -> None:
        self._ask(lambda connection: self._set_cpu_cores(connection, uuid, cores))

    def usage(self, uuid: UUID) -> GuestUsage:
        return self._ask(lambda connection: self._usage(connection, uuid))

    def facts(self) -> HostFacts:
        return self._ask(_facts)

    def _start(self, connection: "libvirt.virConnect", spec: GuestSpec) -> None:
        domain = self._find(connection, spec.uuid)
        if domain is None:
            domain = self._create(connection, spec)
        if _guest_state(domain) is GuestState.HALTED:
            self._resume(domain, spec.uuid)

    def _resume(self, domain: "libvirt.virDomain", uuid: UUID) -> None:
        """Let a guest go on whose disk had failed.

        QEMU takes a while to find a disk that came back, and each request before that halts
        the guest again.
        """
        until = time.monotonic() + RESUME_TIMEOUT_S
        while time.monotonic() < until:
            try:
                domain.resume()
            except libvirt.libvirtError:
                # A guest that another worker starts stands still for a moment as well.
                if _guest_state(domain) is GuestState.HALTED:
                    raise
            time.sleep(RESUME_STEP_S)
            if _guest_state(domain) is not GuestState.HALTED:
                log.info("guest %s goes on", uuid)
                return
        raise HostUnreachable(self.config.uri, f"the disk of guest {uuid} does not answer")

    def _create(self, connection: "libvirt.virConnect", spec: GuestSpec) -> "libvirt.virDomain":
        context = self._prepare(spec, connection.getType())
        try:
            domain = self._create_with_cpu_share(connection, spec, context)
        except libvirt.libvirtError as error:
            # Another worker may have been quicker with the same guest.
            domain = self._find(connection, spec.uuid)
            if domain is None:
                if _is_unreachable(error):
                    raise
                raise GuestNotStarted(spec.uuid, error.get_error_message()) from error
            return domain
        finally:
            # QEMU has read it, and it holds keys.
            context.config_file.unlink(missing_ok=True)
        log.info("started guest %s on %s", spec.uuid, self.config.uri)
        return domain

    def _create_with_cpu_share(
        self, connection: "libvirt.virConnect", spec: GuestSpec, context: DomainContext
    ) -> "libvirt.virDomain":
        xml = domain_xml(spec, context)
        try:
            return connection.createXML(xml, 0)
        except libvirt.libvirtError as error:
            if not _lacks_cgroup(error):
                raise
            self._tell_of_cputune(error)
            bare = re.sub(r"<cputune>.*?</cputune>", "", xml, flags=re.DOTALL)
            return connection.createXML(bare, 0)

    def _prepare(self, spec: GuestSpec, connection_type: str) -> DomainContext:
        """Make the guest's directories and its config, readable by QEMU alone."""
        directory = spec.channel.parent
        directory.mkdir(parents=True, exist_ok=True)
        spec.serial_log.parent.mkdir(parents=True, exist_ok=True)
        config_file = self._write_config(directory, spec.config)
        label = None
        if connection_type == "QEMU" and self.config.qemu_user is not None:
            user = pwd.getpwnam(self.config.qemu_user)
            label = f"{user.pw_name}:{grp.getgrgid(user.pw_gid).gr_name}"
            # QEMU makes its way here as its own user; what it finds is its own.
            directory.parent.chmod(0o711)
            directory.chmod(0o700)
            shutil.chown(directory, user.pw_name, user.pw_gid)
            shutil.chown(config_file, user.pw_name, user.pw_gid)
        emulated = self.config.accelerator == "tcg"
        real_type = "qemu" if emulated else "kvm"
        return DomainContext(
            type=real_type if connection_type == "QEMU" else connection_type.lower(),
            network=self.config.network,
            accelerator=self.config.accelerator,
            images_dir=self.config.images_dir,
            config_file=config_file,
            target=tap_of(self.config.network, spec.address),
            qemu_label=label,
            tsc_khz=tsc_khz(),
        )

    def _write_config(self, directory: Path, config: bytes) -> Path:
        """Write the config under a name of its own, readable by the owner alone.

        Two starts of one guest at once do not take it from each other's QEMU. A start that
        was killed left its file: it goes once that QEMU cannot be reading it any more.
        """
        for old in directory.glob(f"{CONFIG_PREFIX}*"):
            if time.time() - old.stat().st_mtime > self.config.start_timeout_s:
                old.unlink(missing_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=CONFIG_PREFIX, dir=directory)
        with os.fdopen(descriptor, "wb") as file:
            file.write(config)
        return Path(name)

    def _destroy(self, connection: "libvirt.virConnect", uuid: UUID) -> None:
        domain = self._find(connection, uuid)
        if domain is None:
            return
        try:
            domain.destroy()
        except libvirt.libvirtError as error:
            if not _is_gone(error):
                raise
            return
        log.info("destroyed guest %s on %s", uuid, self.config.uri)

    def _state(self, connection: "libvirt.virConnect", uuid: UUID) -> GuestState:
        domain = self._find(connection, uuid)
        return GuestState.MISSING if domain is None else _guest_state(domain)

    def _guests(self, connection: "libvirt.virConnect") -> list[UUID]:
        prefix = f"{self.config.network}-"
        return [
            UUID(bytes=domain.UUID())
            for domain in connection.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE)
            if domain.name().startswith(prefix)
        ]

    def _set_cpu_cores(
        self, connection: "libvirt.virConnect", uuid: UUID, cores: float | None
    ) -> None:
        domain = self._find(connection, uuid)
        if domain is None:
            raise GuestMissing(uuid)
        share = cpu_share(cores, vcpus=domain.info()[3], accelerator=self.config.accelerator)
        try:
            domain.setSchedulerParameters(_scheduler_parameters(share))
        except libvirt.libvirtError as error:
            if _lacks_cgroup(error):
                self._tell_of_cputune(error)
            elif _is_gone(error):
                raise GuestMissing(uuid) from error
            else:
                raise

    def _usage(self, connection: "libvirt.virConnect", uuid: UUID) -> GuestUsage:
        domain = self._find(connection, uuid)
        if domain is None:
            raise GuestMissing(uuid)
        try:
            memory = domain.memoryStats()
            cpu_time_ns = domain.info()[4]
        except libvirt.libvirtError as error:
            if _is_gone(error):
                raise GuestMissing(uuid) from error
            raise
        usable = memory.get("usable")
        return GuestUsage(
            resident_bytes=memory.get("rss", 0) * KiB,
            available_bytes=None if usable is None else usable * KiB,
            cpu_time_s=cpu_time_ns / 1e9,
        )

    def _find(self, connection: "libvirt.virConnect", uuid: UUID) -> "libvirt.virDomain | None":
        """Return the domain if it is active and ours: another platform's is none of ours."""
        try:
            domain = connection.lookupByUUID(uuid.bytes)
            ours = domain.name().startswith(f"{self.config.network}-")
            return domain if ours and domain.isActive() else None
        except libvirt.libvirtError as error:
            if _is_gone(error):
                return None
            raise

    def _tell_of_cputune(self, error: "libvirt.libvirtError") -> None:
        if not self._told_of_cputune:
            self._told_of_cputune = True
            log.warning("guests' CPU is not bounded on this host: %s", error)

    def _ask(
        self, question: Callable[["libvirt.virConnect"], T], timeout_s: float | None = None
    ) -> T:
        """Ask libvirt in a thread of its own, and wait for the answer only so long.

        A call into libvirt's library cannot be interrupted; if it hangs, its thread stays
        until the keepalive closes the connection, and the caller goes on.
        """
        if not self._stuck.acquire(blocking=False):
            raise HostUnreachable(self.config.uri, "too many calls to it hang")
        call = Call(lambda: question(self._open()), self._stuck.release)
        wait_s = self.config.call_timeout_s if timeout_s is None else timeout_s
        try:
            return call.result(wait_s)
        except TimeoutError as error:
            self.close()
            raise HostUnreachable(self.config.uri, f"no answer within {wait_s:g} s") from error
        except libvirt.libvirtError as error:
            if _is_unreachable(error):
                raise HostUnreachable(self.config.uri, error.get_error_message()) from error
            raise

    def _open(self) -> "libvirt.virConnect":
        with self._connecting:
            if self._connection is not None and self._connection.isAlive():
                return self._connection
            _run_event_loop()
            connection = libvirt.open(self.config.uri)
            _keep_alive(connection)
            self._connection = connection
            return connection


class Call(Generic[T]):
    """A function that runs in a thread of its own."""

    def __init__(self, function: Callable[[], T], done: Callable[[], None]) -> None:
        self._function = function
        self._done = done
        self._finished = threading.Event()
        self._results: list[T] = []
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="libvirt", daemon=True).start()

    def result(self, timeout_s: float) -> T:
        """Return what the function returned, or raise what it raised.

        Raises:
            TimeoutError: it has not ended; it goes on.
        """
        if not self._finished.wait(timeout_s):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as error:
            self._error = error
        finally:
            self._done()
            self._finished.set()


_event_loop = threading.Lock()
_event_loop_pids: set[int] = set()


def _run_event_loop() -> None:
    """Start libvirt's event loop, which the keepalive needs, once in each process."""
    with _event_loop:
        if os.getpid() in _event_loop_pids:
            return
        _event_loop_pids.add(os.getpid())
        # libvirt's own handler prints each error to stderr; ours are raised.
        libvirt.registerErrorHandler(lambda _context, _error: None, None)
        libvirt.virEventRegisterDefaultImpl()
        threading.Thread(target=_serve_events, name="libvirt-events", daemon=True).start()


def _serve_events() -> None:
    while True:
        libvirt.virEventRunDefaultImpl()


def _keep_alive(connection: "libvirt.virConnect") -> None:
    try:
        connection.setKeepAlive(KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT)
    except libvirt.libvirtError as error:
        # libvirt's test driver lives in this process.
        if error.get_error_code() != libvirt.VIR_ERR_NO_SUPPORT:
            raise


def _close(connection: "libvirt.virConnect") -> None:
    try:
        connection.close()
    except libvirt.libvirtError as error:
        log.debug("closing a connection to libvirt: %s", error)


def _guest_state(domain: "libvirt.virDomain") -> GuestState:
    try:
        state = domain.state()[0]
    except libvirt.libvirtError as error:
        if _is_gone(error):
            return GuestState.MISSING
        raise
    if state in (libvirt.VIR_DOMAIN_RUNNING, libvirt.VIR_DOMAIN_BLOCKED):
        return GuestState.RUNNING
    if state in (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PMSUSPENDED):
        return GuestState.HALTED
    # Shutting down, shut off, crashed: it ends, and a transient domain is then gone.
    return GuestState.MISSING


def _facts(connection: "libvirt.virConnect") -> HostFacts:
    info = connection.getInfo()
    return HostFacts(
        memory_bytes=_memory_bytes(connection),
        cpus=info[2],
        hypervisor_version=_version(connection.getVersion()),
        driver_version=_version(connection.getLibVersion()),
    )


def _memory_bytes(connection: "libvirt.virConnect") -> int:
    """Return the host's memory: what `getInfo` tells was seen to be a quarter of it."""
    try:
        return int(connection.getMemoryStats(ALL_CELLS)["total"]) * KiB
    except libvirt.libvirtError as error:
        # libvirt's test driver has none.
        if error.get_error_code() != libvirt.VIR_ERR_NO_SUPPORT:
            raise
        return int(connection.getInfo()[1]) * MiB


def _version(number: int) -> str:
    return f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"


def _scheduler_parameters(share: CpuShare) -> dict[str, int]:
    return {
        "cpu_shares": share.shares,
        "vcpu_period": share.period_us,
        "vcpu_quota": share.quota_us,
    }


def _is_gone(error: "libvirt.libvirtError") -> bool:
    return error.get_error_code() in (
        libvirt.VIR_ERR_NO_DOMAIN,
        # "domain is not running": it ended between two calls.
        libvirt.VIR_ERR_OPERATION_INVALID,
    )


def _lacks_cgroup(error: "libvirt.libvirtError") -> bool:
    """Tell whether the host has no means to bound CPU: no controller, no privilege.

    libvirt has no code of its own for it.
    """
    message = str(error.get_error_message()).lower()
    return error.get_error_code() in (
        libvirt.VIR_ERR_CONFIG_UNSUPPORTED,
        libvirt.VIR_ERR_OPERATION_INVALID,
    ) and ("cgroup" in message or "cpu tuning" in message)


def _is_unreachable(error: "libvirt.libvirtError") -> bool:
    code = error.get_error_code()
    if code in UNREACHABLE:
        return True
    return code in UNREACHABLE_BY_RPC and error.get_error_domain() == libvirt.VIR_FROM_RPC
