"""What a host's worker sees to every other second: that what should be there is, alone.

Level-triggered: it compares rows with guests and disks as they are, so whatever a lost
message or a killed process left behind is found and put right at the next look.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import NamedTuple
from uuid import UUID

from django.utils import timezone

from common.errors import Unavailable
from hosts import local
from hosts.errors import GuestBusy
from hosts.guest.channel import AgentChannel, AgentFailed, AgentSilent
from hosts.hypervisor import Hypervisor
from hosts.models import Host, Volume
from hosts.services import HostReport, record_heartbeat
from hosts.volumes.disks import DiskHealth
from sandboxes import lifecycle, starts
from sandboxes.errors import WrongState
from sandboxes.models import FileView, Sandbox
from sandboxes.past_files import GONE

log = logging.getLogger(__name__)

State = Sandbox.State

# A guest whose agent says nothing for this long is started anew (features.md, "Crash
# recovery"); asked seldom, since an answer costs an emulated guest 10 ms.
SILENT_AGENT_S = 90
PING_EVERY_S = 10
PINGS_AT_ONCE = 8
# What is written to files is stored after this quiet, or when it has waited long enough;
# the files stay open for as long as somebody uses them.
FILES_QUIET = timedelta(seconds=1.5)
FILES_KEPT = timedelta(seconds=15)
FILES_IDLE = timedelta(seconds=45)
# What a start reads is known after the first; after the second it will not be any more.
START_READ = timedelta(seconds=35)
START_UNKNOWN = timedelta(minutes=5)


class FollowUp(NamedTuple):
    """A message that should be sent next: an actor of `sandboxes.actors`, and to whom."""

    actor: str
    subject_id: str


class Watcher:
    """What one worker process remembers between two looks."""

    def __init__(self) -> None:
        self._looking = threading.Lock()
        self._heard_at: dict[UUID, float] = {}
        self._asked_at: dict[UUID, float] = {}
        self._stray_since: dict[UUID, float] = {}
        self._learned: set[str] = set()

    def look(self) -> list[FollowUp]:
        """Look once; does nothing while another thread looks."""
        if not self._looking.acquire(blocking=False):
            return []
        try:
            return self._look()
        finally:
            self._looking.release()

    def _look(self) -> list[FollowUp]:
        host = local.this_host()
        with local.hypervisor() as hypervisor:
            record_heartbeat(host, _report(hypervisor))
            guests = set(hypervisor.guests())
            follow_ups = list(self._see_to_running(host, guests, hypervisor))
            self._end_strays(host, guests, hypervisor)
        follow_ups += _see_to_files(host)
        follow_ups += _see_to_views(host)
        _drop_left_over_disks(host)
        return follow_ups

    # -- guests ---------------------------------------------------------------------------

    def _see_to_running(
        self, host: Host, guests: set[UUID], hypervisor: Hypervisor
    ) -> Iterator[FollowUp]:
        running = list(
            Sandbox.objects.filter(host=host, state=State.RUNNING).select_related(
                "team", "volume"
            )
        )
        self._learned &= {sandbox.runtime_id for sandbox in running}
        silent = self._silent([s.uuid for s in running if s.uuid in guests])
        for sandbox in running:
            reason = _what_died(sandbox, guests, silent)
            if reason is None:
                lifecycle.resume_billing(sandbox)
                self._learn_start(sandbox)
            elif self._recover(sandbox, reason, hypervisor):
                yield FollowUp("boot_sandbox", sandbox.id)

    def _learn_start(self, sandbox: Sandbox) -> None:
        """Keep what a start has read, once it is known."""
        started_at = sandbox.started_at
        if sandbox.runtime_id in self._learned or started_at is None:
            return
        age = timezone.now() - started_at
        if age > START_READ and (starts.remember_start(sandbox) or age > START_UNKNOWN):
            self._learned.add(sandbox.runtime_id)

    def _silent(self, uuids: list[UUID]) -> set[UUID]:
        """Return the guests whose agent has said nothing for too long."""
        now = time.monotonic()
        due = [u for u in uuids if now - self._asked_at.get(u, 0) > PING_EVERY_S]
        self._asked_at |= dict.fromkeys(due, now)
        with ThreadPoolExecutor(PINGS_AT_ONCE) as pool:
            answers = dict(zip(due, pool.map(_answers, due), strict=True))
        for uuid in uuids:
            if answers.get(uuid) or uuid not in self._heard_at:
                self._heard_at[uuid] = now
        for forgotten in self._heard_at.keys() - set(uuids):
            del self._heard_at[forgotten]
            self._asked_at.pop(forgotten, None)
        return {u for u in uuids if now - self._heard_at[u] > SILENT_AGENT_S}

    def _recover(self, sandbox: Sandbox, reason: str, hypervisor: Hypervisor) -> bool:
        """Take a dead guest's remains away and ask for it to be started again."""
        try:
            with local.guest_lock(sandbox.uuid):
                lifecycle.begin_recovery(sandbox, reason)
                hypervisor.destroy(sandbox.uuid)
        except (GuestBusy, WrongState):
            return False
        self._heard_at.pop(sandbox.uuid, None)
        log.warning("sandbox %s is started again: %s", sandbox.id, reason)
        return True

    def _end_strays(self, host: Host, guests: set[UUID], hypervisor: Hypervisor) -> None:
        """Destroy guests that no sandbox wants to run here, seen twice in a row."""
        wanted = set(
            Sandbox.objects.filter(uuid__in=guests, host=host)
            .exclude(state__in=(State.PAUSED, State.DELETED, State.FAILED))
            .values_list("uuid", flat=True)
        )
        strays = guests - wanted
        for uuid in strays & self._stray_since.keys():
            log.warning("guest %s belongs to no sandbox; it is destroyed", uuid)
            try:
                with local.guest_lock(uuid):
                    hypervisor.destroy(uuid)
            except GuestBusy:
                continue
        self._stray_since = dict.fromkeys(strays, time.monotonic())


def _report(hypervisor: Hypervisor) -> HostReport:
    facts = hypervisor.facts()
    return HostReport(
        used_bytes=_used_bytes(),
        cpu_count=facts.cpus,
        versions={
            "hypervisor": facts.hypervisor_version,
            "libvirt": facts.driver_version,
            "kernel": os.uname().release,
        },
    )


def _used_bytes() -> int:
    """Return the memory of this machine that is neither free nor a mere cache.

    Source: proc(5), /proc/meminfo, which counts in KiB.
    """
    with open("/proc/meminfo") as lines:  # noqa: PTH123  (read every other second)
        kib = {name: int(rest.split()[0]) for name, rest in (x.split(":") for x in lines)}
    return (kib["MemTotal"] - kib["MemAvailable"]) * 1024


def _what_died(sandbox: Sandbox, guests: set[UUID], silent: set[UUID]) -> str | None:
    if sandbox.uuid not in guests:
        return "The guest ended unexpectedly and was started again."
    if not _has_disk(sandbox.volume_id):
        return "The guest's disk server ended unexpectedly; both were started again."
    if sandbox.uuid in silent:
        return f"The guest did not answer for {SILENT_AGENT_S} s and was started again."
    return None


def _has_disk(volume_id: UUID) -> bool:
    """Tell whether a disk is served; where only its export died, it is mended."""
    disks = local.disks()
    if disks.health(volume_id) is DiskHealth.ATTACHED:
        return True
    try:
        return disks.mend(volume_id)
    except Unavailable as error:
        # Its storage daemon lives, and waits for the export as long as its reader does.
        log.warning("the export of volume %s is not back yet: %s", volume_id, error)
        return True


def _answers(uuid: UUID) -> bool:
    try:
        AgentChannel(local.channel_path(uuid)).ping()
    except AgentSilent:
        return False
    except AgentFailed:
        return True  # it lives, and says that something else is wrong
    return True


# -- disks --------------------------------------------------------------------------------


def _see_to_files(host: Host) -> Iterator[FollowUp]:
    """Store what was written to files; close those that are idle or not wanted."""
    opened = Sandbox.objects.filter(
        volume__attached_host=host, volume__attached_for=Volume.Purpose.FILES
    ).select_related("volume")
    files = local.paused_files()
    files.warm()
    local.disks().warm()
    for sandbox in opened:
        volume = sandbox.volume
        if sandbox.state != State.PAUSED:
            yield FollowUp("close_files", sandbox.id)
        elif volume.files_ready_at is None:
            # Asked for and not served: its message was lost, or its server died.
            yield FollowUp("open_files", sandbox.id)
        elif not files.is_open(volume.pk) or not _has_disk(volume.pk):
            yield FollowUp("close_files", sandbox.id)
        else:
            used_at = files.last_used_at(volume.pk) or volume.files_ready_at
            idle = timezone.now() - used_at
            if _is_due(volume.pk, idle):
                yield FollowUp("commit_files", sandbox.id)
            elif idle > FILES_IDLE:
                yield FollowUp("close_files", sandbox.id)


def _is_due(volume_id: UUID, idle: timedelta) -> bool:
    """Tell whether what was written to open files should be stored now."""
    files = local.paused_files()
    if not files.is_dirty(volume_id):
        return False
    marked_at = files.marked_at(volume_id)
    return idle > FILES_QUIET or marked_at is None or timezone.now() - marked_at > FILES_KEPT


def _see_to_views(host: Host) -> Iterator[FollowUp]:
    """Close views of the past that nobody reads, or whose sandbox is deleted."""
    files = local.paused_files()
    views = FileView.objects.filter(volume__attached_host=host)
    for view in views.select_related("sandbox", "volume"):
        volume = view.volume
        if view.sandbox.state in GONE or view.error:
            yield FollowUp("close_view", str(view.pk))
        elif volume.files_ready_at is None:
            yield FollowUp("open_view", str(view.pk))
        elif not files.is_open(volume.pk) or not _has_disk(volume.pk):
            yield FollowUp("close_view", str(view.pk))
        else:
            used_at = files.last_used_at(volume.pk) or volume.files_ready_at
            if timezone.now() - used_at > FILES_IDLE:
                yield FollowUp("close_view", str(view.pk))


def _drop_left_over_disks(host: Host) -> None:
    """Take disks down whose volume is no longer this host's.

    Its row says so only after everything was committed, or the sandbox deleted, or after
    another host took the volume over: in each case nothing here is wanted any more.
    """
    attached = {disk.volume_id: disk for disk in local.disks().attached()}
    mine = set(
        Volume.objects.filter(pk__in=attached, attached_host=host).values_list("pk", flat=True)
    )
    for volume_id in attached.keys() - mine:
        uuid = (
            Sandbox.objects.filter(volume_id=volume_id).values_list("uuid", flat=True).first()
        )
        try:
            with local.guest_lock(uuid or volume_id):
                if Volume.objects.filter(pk=volume_id, attached_host=host).exists():
                    continue
                local.paused_files().close(volume_id)
                local.disks().detach(volume_id, discard=True)
        except Unavailable as error:
            log.info("a left-over disk of %s stays for now: %s", volume_id, error)
