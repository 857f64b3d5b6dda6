"""What a host's worker does to a sandbox. May take minutes; safe to repeat.

Every operation takes the guest's lock, so that one thing at a time is done to a guest and
its disk, and then looks at the row: what is asked for there is done, whatever the message
said. A worker that dies on any line leaves a row that says what to do, and a disk that
says what was done.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from uuid import UUID

from django.utils import timezone

from common.errors import Refused, Unavailable
from hosts import local
from hosts.errors import VolumeBusy
from hosts.guest.channel import AgentChannel, AgentFailed, AgentSilent
from hosts.hypervisor import GuestState, Hypervisor, cores_for
from hosts.models import Generation, Volume
from hosts.paused_files import FilesUnavailable, FileSystemDamaged
from hosts.services import (
    attach_volume,
    count_gets,
    detach_volume,
    mark_files_ready,
    publish_commit,
)
from hosts.volumes.commit import Commit
from hosts.volumes.disks import AttachedDisk, DiskHealth
from hosts.volumes.errors import NotAttached
from sandboxes import cuts, disk_samples, lifecycle, starts
from sandboxes.errors import QuotaExceeded, WrongState
from sandboxes.events import announce
from sandboxes.guests import guest_spec, public_host_key
from sandboxes.models import Cut, Sandbox

log = logging.getLogger(__name__)

State = Sandbox.State

# One boot under software emulation on a machine that boots ten others.
READY_TIMEOUT_S = 150
READY_POLL_S = 0.1
PING_TIMEOUT_S = 3.0
# From the request on; after it the customer is told instead of kept waiting.
GIVE_UP_AFTER = timedelta(minutes=6)
# What processes get to end by themselves at a pause, and a frozen file system to settle.
STOP_DEADLINE_S = 10
FREEZE_DEADLINE_S = 5
RELATED = ("team", "host", "template__generation", "volume__head", "volume__attached_host")
STORE_AWAY = "The object store does not take the upload; trying again."


class GuestNotReady(Unavailable):
    """The guest runs and its agent does not answer."""

    code = "guest_not_ready"

    def __init__(self, uuid: UUID, reason: str) -> None:
        super().__init__(uuid, reason)
        self.uuid = uuid
        self.reason = reason

    def __str__(self) -> str:
        return f"Guest {self.uuid} is not ready: {self.reason}"


def this_queue() -> str:
    """Return the name of this host's queue."""
    return local.this_host().queue


@contextmanager
def _locked(
    sandbox_id: str, *states: State, related: Sequence[str] = RELATED
) -> Iterator[Sandbox | None]:
    """Yield the sandbox, alone on this host with it; None where its state is another.

    Args:
        related: what is read along with it.

    Raises:
        GuestBusy: another thread acts on it; the message comes again.
    """
    guest_uuid = Sandbox.objects.values_list("uuid", flat=True).get(pk=sandbox_id)
    with local.guest_lock(guest_uuid):
        sandbox = _read(sandbox_id, related)
        yield sandbox if sandbox.state in states else None


def _read(sandbox_id: str, related: Sequence[str] = RELATED) -> Sandbox:
    return Sandbox.objects.select_related(*related).get(pk=sandbox_id)


def _is_mine(sandbox: Sandbox) -> bool:
    return local.is_this(sandbox.host)


# -- start --------------------------------------------------------------------------------


def boot(sandbox_id: str) -> None:
    """Run the guest of a sandbox that is starting or resuming, on its committed disk.

    A disk that this host still holds for it (its guest died, or its pause was turned
    round) is used as it is: it has what no commit has yet.

    Raises:
        Unavailable: it does not run yet; the message comes again.
    """
    with _locked(sandbox_id, State.STARTING, State.RESUMING) as sandbox:
        if sandbox is None or not _is_mine(sandbox):
            return
        try:
            _boot(sandbox)
        except Unavailable as error:
            log.warning("sandbox %s does not start: %s", sandbox.id, error)
            if timezone.now() - sandbox.state_changed_at < GIVE_UP_AFTER:
                raise
            _give_up(sandbox, str(error))


def _boot(sandbox: Sandbox) -> None:
    _end_files(sandbox)
    host = sandbox.host
    assert host is not None
    volume = attach_volume(sandbox.volume_id, host=host, purpose=Volume.Purpose.RUN)
    sandbox.volume = volume
    assert volume.head is not None
    with local.hypervisor() as hypervisor:
        _end_earlier_life(volume, sandbox.uuid, hypervisor)
        disk = local.disks().attach(
            volume.pk,
            root_key=volume.head.root_key,
            epoch=volume.epoch,
            start_blocks=starts.recording_for(sandbox),
        )
        hypervisor.start(guest_spec(sandbox, disk_socket=disk.socket))
        try:
            _make_ready(sandbox, hypervisor)
        except GuestNotReady:
            hypervisor.destroy(sandbox.uuid)
            raise
        _go_live(sandbox, hypervisor, disk)
    disk_samples.record(sandbox)


def _end_earlier_life(volume: Volume, uuid: UUID, hypervisor: Hypervisor) -> None:
    """Destroy a guest that runs on since this host was thought lost, on an older disk."""
    for disk in local.disks().attached():
        if disk.volume_id == volume.pk and disk.epoch < volume.epoch:
            hypervisor.destroy(uuid)


def _make_ready(sandbox: Sandbox, hypervisor: Hypervisor) -> None:
    """Wait until the guest's agent answers, then set its clock.

    Raises:
        GuestNotReady: it does not in time, or the guest ended.
        WrongState: the sandbox is no longer wanted.
    """
    channel = AgentChannel(local.channel_path(sandbox.uuid))
    give_up_at = time.monotonic() + READY_TIMEOUT_S
    look_at = time.monotonic() + 1
    while not _is_ready(channel):
        now = time.monotonic()
        if now > give_up_at:
            raise GuestNotReady(sandbox.uuid, f"no answer in {READY_TIMEOUT_S} s")
        if now > look_at:
            look_at = now + 1
            if hypervisor.state(sandbox.uuid) is GuestState.MISSING:
                raise GuestNotReady(sandbox.uuid, "it ended while it booted")
            if not Sandbox.objects.filter(pk=sandbox.pk, state=sandbox.state).exists():
                hypervisor.destroy(sandbox.uuid)
                raise WrongState("no longer wanted", State.RUNNING)
        time.sleep(READY_POLL_S)
    channel.set_clock(time.time())


def _is_ready(channel: AgentChannel) -> bool:
    try:
        return channel.ping(timeout_s=PING_TIMEOUT_S).ready
    except (AgentSilent, AgentFailed):
        return False


def _go_live(sandbox: Sandbox, hypervisor: Hypervisor, disk: AttachedDisk) -> None:
    hypervisor.set_cpu_cores(sandbox.uuid, cores_for(sandbox.memory_bytes))
    sandbox.host_public_key = public_host_key(sandbox)
    sandbox.save(update_fields=["host_public_key"])
    fetched = local.disks().fetched(disk.volume_id)
    try:
        lifecycle.begin_running(sandbox, fetched_bytes=fetched.bytes)
    except WrongState:
        # Deleted while it booted: `destroy` may have looked before there was a guest.
        hypervisor.destroy(sandbox.uuid)
        raise
    log.info("sandbox %s runs, generation %d", sandbox.id, sandbox.runtime_generation)


def _give_up(sandbox: Sandbox, reason: str) -> None:
    """Stop trying to start a sandbox. What its disk holds here is committed first."""
    with local.hypervisor() as hypervisor:
        hypervisor.destroy(sandbox.uuid)
    volume = sandbox.volume
    if sandbox.state == State.STARTING:
        lifecycle.abandon_start(sandbox, epoch=volume.epoch, reason=reason)
    else:
        if volume.attached_for == Volume.Purpose.RUN:
            _commit(volume, Generation.Kind.PAUSE)
        lifecycle.abandon_resume(sandbox, epoch=volume.epoch, reason=reason)
    local.disks().detach(volume.pk, discard=True)


# -- pause --------------------------------------------------------------------------------


def pause(sandbox_id: str) -> str | None:
    """Stop a pausing sandbox's guest, commit its disk, and only then call it paused.

    Returns:
        The queue to send its boot to, where it was wished awake again meanwhile.

    Raises:
        Unavailable: what it wrote is not all stored yet; it is safe on this host, and the
            message comes again.
    """
    with _locked(sandbox_id, State.PAUSING) as sandbox:
        if sandbox is None or not _is_mine(sandbox):
            return None
        if not _stop_guest(sandbox):
            return None
        if sandbox.resume_when_paused and sandbox.health == STORE_AWAY:
            # Another try may take minutes to fail.
            return _turn_round(sandbox)
        try:
            _commit(sandbox.volume, Generation.Kind.PAUSE)
        except Unavailable as error:
            return _wait_for_store(sandbox, error)
        lifecycle.end_pause(sandbox, epoch=sandbox.volume.epoch)
        local.disks().detach(sandbox.volume_id, discard=True)
        log.info("sandbox %s sleeps", sandbox.id)
        return _wake_if_wished(sandbox)


def _stop_guest(sandbox: Sandbox) -> bool:
    """End the guest with a clean disk; False where its agent would not have it.

    A guest that cannot be asked is not cut off: what its programs wrote may still be in
    its memory alone. It runs on, billed again, and the row says why.
    """
    with local.hypervisor() as hypervisor:
        if hypervisor.state(sandbox.uuid) is GuestState.MISSING:
            return True
        disk_samples.record(sandbox, must=True)
        channel = AgentChannel(local.channel_path(sandbox.uuid))
        try:
            with suppress(Refused, Unavailable):
                # What it has in its memory must reach the disk before the deadline.
                local.disks().ease(sandbox.volume_id)
            channel.prepare_stop(STOP_DEADLINE_S)
        except (AgentSilent, AgentFailed) as error:
            if hypervisor.state(sandbox.uuid) is not GuestState.MISSING:
                lifecycle.refuse_pause(sandbox, f"The pause failed: {error}")
                log.warning("sandbox %s runs on: %s", sandbox.id, error)
                return False
        hypervisor.destroy(sandbox.uuid)
        return True


def _wait_for_store(sandbox: Sandbox, error: Unavailable) -> str | None:
    """Keep a pause whose upload failed waiting, or turn it round if that is wished."""
    sandbox.refresh_from_db(fields=["resume_when_paused", "state"])
    if sandbox.resume_when_paused and sandbox.state == State.PAUSING:
        return _turn_round(sandbox)
    _tell_health(sandbox, STORE_AWAY)
    log.warning("sandbox %s is not stored yet: %s", sandbox.id, error)
    raise error


def _turn_round(sandbox: Sandbox) -> str:
    lifecycle.resume_instead_of_pause(sandbox)
    return this_queue()


def _tell_health(sandbox: Sandbox, health: str) -> None:
    if sandbox.health != health:
        sandbox.health = health
        sandbox.save(update_fields=["health"])
        announce(sandbox)


def _wake_if_wished(sandbox: Sandbox) -> str | None:
    sandbox = _read(sandbox.id)
    if not sandbox.resume_when_paused or sandbox.state != State.PAUSED:
        return None
    try:
        lifecycle.begin_resume(sandbox)
    except (Unavailable, WrongState, QuotaExceeded) as error:
        Sandbox.objects.filter(pk=sandbox.pk).update(
            resume_when_paused=False, last_error=str(error)
        )
        return None
    assert sandbox.host is not None
    return sandbox.host.queue


def _commit(volume: Volume, kind: Generation.Kind) -> Commit | None:
    """Store what the disk, used by nobody now, has written, and move the head to it."""
    commit = local.disks().commit(volume.pk, publisher(volume, kind))
    _count_gets(volume)
    return commit


def publisher(volume: Volume, kind: Generation.Kind) -> Callable[[Commit], None]:
    """Return what moves the volume's head to a commit that was made under its epoch."""

    def publish(commit: Commit) -> None:
        # Not with each commit in the background: it is as long as a small commit.
        is_kept = kind in (Generation.Kind.PAUSE, Generation.Kind.CHECKPOINT)
        publish_commit(
            volume.pk,
            epoch=volume.epoch,
            kind=kind,
            commit=commit,
            start_blocks=starts.recording_of(volume) if is_kept else None,
        )
        _count_gets(volume)

    return publish


def _count_gets(volume: Volume) -> None:
    """Note what the volume's export has asked of the store; it forgets when it is detached."""
    requests = local.disks().fetched(volume.pk).requests
    count_gets(volume.pk, epoch=volume.epoch, requests=requests)


def checkpoint(sandbox_id: str) -> None:
    """Commit the disk of a running sandbox, its file system frozen for the cut alone.

    Raises:
        AgentSilent: the guest could not be frozen; nothing was committed.
    """
    with _locked(sandbox_id, State.RUNNING) as sandbox:
        if sandbox is None or not _is_mine(sandbox):
            return
        channel = AgentChannel(local.channel_path(sandbox.uuid))
        local.disks().checkpoint(
            sandbox.volume_id,
            publisher(sandbox.volume, Generation.Kind.CHECKPOINT),
            around_cut=lambda: _frozen(channel),
        )
        announce(sandbox)


@contextmanager
def _frozen(channel: AgentChannel) -> Iterator[None]:
    """Hold the guest's file system still; the guest thaws itself at the deadline, too.

    Raises:
        AgentSilent, AgentFailed: it was not still; what was cut meanwhile is no better than
            what a power failure leaves.
    """
    channel.sync()  # most is written out before anybody has to wait
    asked_at = time.monotonic()
    channel.freeze(FREEZE_DEADLINE_S)
    try:
        yield
    finally:
        channel.thaw()
    if time.monotonic() - asked_at > FREEZE_DEADLINE_S:
        raise AgentFailed("freeze", "the cut took longer than the file system may be held")


# -- cuts ---------------------------------------------------------------------------------


class CutTooSoon(Unavailable):
    """The sandbox is between two states; a cut of it can be made when it has arrived."""

    def __str__(self) -> str:
        return "The sandbox is between two states."


def cut(sandbox_id: str) -> None:
    """Find or make the committed state of a sandbox's disk that requests wait for.

    Raises:
        CutTooSoon: it starts or stops; the message comes again.
        Unavailable: it is not stored yet; the message comes again.
    """
    with _locked(sandbox_id, *State) as sandbox:
        assert sandbox is not None
        wanted = cuts.wanted_cuts(sandbox)
        if not wanted:
            return
        match sandbox.state:
            case State.RUNNING if _is_mine(sandbox):
                while wanted:
                    _cut_running(sandbox, wanted)
                    # Others may have come meanwhile, and found the guest busy.
                    wanted = cuts.wanted_cuts(sandbox)
            case State.PAUSED:
                _cut_paused(sandbox, wanted)
            case State.FAILED | State.TERMINATING | State.DELETED:
                cuts.fail_cuts(sandbox, wanted, f"The sandbox is {sandbox.wire_status}.")
            case State.STARTING | State.PAUSING | State.RESUMING if _is_mine(sandbox):
                raise CutTooSoon
            case _:
                log.info("sandbox %s is elsewhere; its host is asked for the cut", sandbox.id)


def _cut_running(sandbox: Sandbox, wanted: Sequence[Cut]) -> None:
    gentle = [one for one in wanted if one.consistency == Cut.Consistency.FILESYSTEM]
    if gentle:
        channel = AgentChannel(local.channel_path(sandbox.uuid))
        try:
            generation = _cut_disk(sandbox, lambda: _frozen(channel))
        except (AgentSilent, AgentFailed) as error:
            log.warning("sandbox %s was not frozen for a cut: %s", sandbox.id, error)
            cuts.fail_cuts(sandbox, gentle, cuts.NO_ANSWER)
        else:
            cuts.end_cuts(sandbox, wanted, generation)
            return
    rest = [one for one in wanted if one not in gentle]
    if rest:
        cuts.end_cuts(sandbox, rest, _cut_disk(sandbox, nullcontext))


def _cut_disk(
    sandbox: Sandbox, around_cut: Callable[[], AbstractContextManager[None]]
) -> Generation:
    """Commit a running sandbox's disk; returns the generation that holds its state."""
    volume = sandbox.volume
    publish = publisher(volume, Generation.Kind.CHECKPOINT)
    root_key = local.disks().cut(volume.pk, publish, around_cut=around_cut).root_key
    # The head may have moved on since, by a commit in the background.
    if volume.head is not None and volume.head.root_key == root_key:
        return volume.head
    return Generation.objects.filter(volume=volume, root_key=root_key).latest("number")


def _cut_paused(sandbox: Sandbox, wanted: Sequence[Cut]) -> None:
    """Take the head, once it has what was edited while the files were open."""
    volume = sandbox.volume
    if volume.attached_for == Volume.Purpose.FILES:
        if not holds(volume):
            return
        if local.paused_files().is_dirty(volume.pk):
            _store_edits(sandbox)
    assert volume.head is not None
    cuts.end_cuts(sandbox, wanted, volume.head)


def _store_edits(sandbox: Sandbox) -> None:
    """Commit what was written to the files, which stay open where they can be held still."""
    volume = sandbox.volume
    if local.paused_files().is_open(volume.pk):
        try:
            store_files(volume)
        except (FilesUnavailable, NotAttached) as error:
            log.info("the files of sandbox %s are closed to be stored: %s", sandbox.id, error)
        else:
            volume.refresh_from_db()
            return
    _end_files(sandbox)


# -- end ----------------------------------------------------------------------------------


def destroy(sandbox_id: str) -> None:
    """Take down what this host has of a sandbox that is being deleted."""
    with _locked(sandbox_id, State.TERMINATING) as sandbox:
        if sandbox is None:
            return
        with local.hypervisor() as hypervisor:
            hypervisor.destroy(sandbox.uuid)
        local.paused_files().close(sandbox.volume_id)
        _count_gets(sandbox.volume)
        local.disks().detach(sandbox.volume_id, discard=True)
        lifecycle.end_termination(sandbox)
        log.info("sandbox %s is gone", sandbox.id)


# -- files while paused -------------------------------------------------------------------


def open_files(sandbox_id: str) -> None:
    """Serve the files of a paused sandbox, until nobody has used them for a while.

    Raises:
        Unavailable: they are not served; nothing has changed.
    """
    related = ("volume__head", "volume__attached_host")
    with _locked(sandbox_id, State.PAUSED, related=related) as sandbox:
        if sandbox is None:
            return
        volume = sandbox.volume
        if volume.attached_for != Volume.Purpose.FILES or not holds(volume):
            return
        if not local.paused_files().is_open(volume.pk):
            mount_files(volume)
        mark_files_ready(volume.pk, epoch=volume.epoch, at=timezone.now())
        announce(sandbox)


def mount_files(volume: Volume) -> None:
    """Serve the files of a volume's head, over an overlay of its own."""
    assert volume.head is not None
    disks, root_key = local.disks(), volume.head.root_key
    device = local.device_file(volume.pk)

    def show() -> None:
        disks.attach(volume.pk, root_key=root_key, epoch=volume.epoch, shown_at=device)

    local.paused_files().open(volume.pk, device, show=show)


def holds(volume: Volume) -> bool:
    """Tell whether this host has the volume attached, its host read along with it."""
    return local.is_this(volume.attached_host)


def store_files(volume: Volume) -> None:
    """Commit what was written to a volume's open files until now; they stay open.

    Raises:
        FilesUnavailable: they cannot be held still for the cut.
        NotAttached: the disk under them died; closing them brings it back.
        Unavailable: it is not all stored yet; the next call goes on.
    """
    files = local.paused_files()
    marks = 0

    @contextmanager
    def held_still() -> Iterator[None]:
        nonlocal marks
        with files.settled(volume.pk) as marks:
            yield

    local.disks().checkpoint(
        volume.pk, publisher(volume, Generation.Kind.FILES), around_cut=held_still
    )
    # What is written from the cut on has marks of its own.
    files.note_stored(volume.pk, marks)


def close_files(sandbox_id: str) -> None:
    """Commit what was written to a paused sandbox's files, and serve them no longer.

    Raises:
        Unavailable: it is not all stored yet; the message comes again.
    """
    states = set(State) - {State.DELETED}
    with _locked(sandbox_id, *states) as sandbox:
        if sandbox is not None:
            _end_files(sandbox)


def _end_files(sandbox: Sandbox) -> None:
    """Close the sandbox's files if this host serves them.

    A file system that cannot be mended is stored as it is, like that of a guest that died:
    nothing that was written to it is thrown away, and the row says why.

    Raises:
        VolumeBusy: another host does; it closes them when it sees the sandbox's new state.
    """
    volume = sandbox.volume
    if volume.attached_for != Volume.Purpose.FILES:
        return
    if not holds(volume):
        assert volume.attached_host_id is not None
        raise VolumeBusy(volume.pk, volume.attached_host_id)
    mark_files_ready(volume.pk, epoch=volume.epoch, at=None)
    try:
        _settle_files(volume)
    except FileSystemDamaged as error:
        log.warning("the files of sandbox %s are stored as they are: %s", sandbox.id, error)
        sandbox.last_error = f"The files were cut off. {error}"[:300]
        sandbox.save(update_fields=["last_error"])
    if not local.paused_files().is_unchanged(volume.pk):
        _commit(volume, Generation.Kind.FILES)
    local.paused_files().clear_dirty(volume.pk)
    detach_volume(volume.pk, epoch=volume.epoch)
    local.disks().detach(volume.pk, discard=True)
    volume.refresh_from_db()
    announce(sandbox)


def _settle_files(volume: Volume) -> None:
    """Unmount the files. What a killed server left half done is mended before it counts."""
    files, disks = local.paused_files(), local.disks()
    if disks.health(volume.pk) is DiskHealth.ABSENT:
        files.close(volume.pk)
        return
    if not files.close(volume.pk):
        mount_files(volume)
        if not files.close(volume.pk):
            raise FilesUnavailable("The files were not unmounted properly.")
    with suppress(NotAttached):  # its daemon died since: what it had is in the overlay
        disks.drop_fuse(volume.pk)
