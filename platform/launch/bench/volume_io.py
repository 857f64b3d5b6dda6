"""Reading and writing a volume, against a plain local qcow2 under the same daemon."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common.units import KiB, MiB
from hosts.volumes.objects import StoreConfig
from launch.bench.figures import Figure
from launch.bench.rig import (
    SCATTER_BYTES,
    Host,
    Samples,
    Scale,
    Volume,
    drive,
    host,
    make_image,
    plain_disk,
)
from launch.progress import step

BENCH = "volumes"
SEQUENTIAL_BYTES = MiB
SMALL_BYTES = 4 * KiB
COLD_SHARE = 10
"""Cold requests wait for the store, so one in so many is enough."""

WARM_LEAST, OVERLAY_LEAST = 0.8, 0.95

REPEATS = 3
"""What can be repeated is, by turns with the local disk, so that a load hits both."""


def io(store: StoreConfig, folder: Path, scale: Scale) -> Iterator[Figure]:
    """Sequential and scattered reads and writes, in every state that data can be in."""
    image = make_image(folder / "image", scale.data_bytes)
    with host(folder, store) as one, plain_disk(folder, image) as plain:
        volume = one.volume(one.import_image(image, scale.data_bytes))
        measured = _Measured(volume, plain, scale)
        for number in range(1, scale.rounds + 1):
            with step(f"reads and writes, round {number} of {scale.rounds}"):
                _new(measured, one)
                _used(measured)
    yield from measured.figures()


class _Load:
    """The requests of one measurement."""

    def __init__(self, scale: Scale, *, is_small: bool, writes: bool = False) -> None:
        self._scale = scale
        self._is_small = is_small
        self._writes = writes
        self.what = f"{'4 KiB ' if is_small else ''}{'write' if writes else 'read'}"
        self.unit = "/s" if is_small else "MiB/s"

    def drive(self, socket: Path, share: int = 1) -> float:
        """Send them, or one in `share` of the small ones; return how many a second."""
        if not self._is_small:
            count = self._scale.data_bytes // SEQUENTIAL_BYTES
            return drive(socket, size_bytes=MiB, count=count, writes=self._writes)
        return drive(
            socket,
            size_bytes=SMALL_BYTES,
            count=max(20, self._scale.requests // share),
            step_bytes=SCATTER_BYTES,
            writes=self._writes,
        )


@dataclass
class _Measured:
    """Both disks, and what was measured of them."""

    volume: Volume
    plain: Path
    scale: Scale
    samples: Samples = field(default_factory=Samples)
    rows: dict[str, tuple[str, float | None]] = field(default_factory=dict)
    """Name → unit, the least ratio that is good enough."""

    def loads(self, *, writes: bool = False) -> tuple[_Load, _Load]:
        return (
            _Load(self.scale, is_small=False, writes=writes),
            _Load(self.scale, is_small=True, writes=writes),
        )

    def compare(
        self, load: _Load, state: str, *, least: float | None = None, once: bool = False
    ) -> None:
        """Measure the volume, by turns with the local disk."""
        name = f"{load.what}, {state}"
        self.rows[name] = (load.unit, least)
        for _ in range(1 if once else REPEATS):
            self.samples.add(f"{name} local", load.drive(self.plain))
            self.samples.add(name, load.drive(self.volume.socket, COLD_SHARE if once else 1))

    def figures(self) -> Iterator[Figure]:
        for name, (unit, least) in self.rows.items():
            yield Figure(
                bench=BENCH,
                name=f"{name}, against local",
                value=self.samples[name],
                baseline=self.samples[f"{name} local"],
                unit=unit,
                least=least,
            )


def _new(measured: _Measured, one: Host) -> None:
    """Nothing is on this host; then the packs are, and the disk is new."""
    for load in measured.loads():
        for state in ("cold", "in the host's cache"):
            if state == "cold":
                one.empty_cache()
            measured.volume.attach()
            measured.compare(load, state, once=True)
            measured.volume.discard()


def _used(measured: _Measured) -> None:
    """All of it was read before; then written over."""
    volume = measured.volume
    volume.attach()
    reads, writes = measured.loads(), measured.loads(writes=True)
    reads[0].drive(volume.socket)
    for load in reads:
        measured.compare(load, "read before", least=WARM_LEAST)
    for load in reversed(writes):
        measured.compare(load, "first to its block", once=True)
    writes[0].drive(volume.socket)
    for load in (*reads, *writes):
        measured.compare(load, "written here", least=OVERLAY_LEAST)
    volume.discard()
