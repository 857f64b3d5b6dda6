"""Reading and writing a volume, against a plain local qcow2 under the same daemon."""

from collections.abc import Iterator
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

_STATES = {
    "written here": OVERLAY_LEAST,
    "read before": WARM_LEAST,
    "in the host's cache": None,
    "cold": None,
}


def io(store: StoreConfig, folder: Path, scale: Scale) -> Iterator[Figure]:
    """Sequential and scattered reads and writes, in every state that data can be in."""
    image = make_image(folder / "image", scale.data_bytes)
    samples = Samples()
    with host(folder, store) as one, plain_disk(folder, image) as plain:
        volume = one.volume(one.import_image(image, scale.data_bytes))
        for number in range(1, scale.rounds + 1):
            with step(f"reads and writes, round {number} of {scale.rounds}"):
                _local(plain, scale, samples)
                _cold(one, volume, scale, samples)
                _warm(volume, scale, samples)
    yield from _figures(samples)


def _sequential(socket: Path, scale: Scale, *, writes: bool = False) -> float:
    count = scale.data_bytes // SEQUENTIAL_BYTES
    return drive(socket, size_bytes=SEQUENTIAL_BYTES, count=count, writes=writes)


def _scattered(socket: Path, count: int, *, writes: bool = False) -> float:
    return drive(
        socket, size_bytes=SMALL_BYTES, count=count, step_bytes=SCATTER_BYTES, writes=writes
    )


def _local(plain: Path, scale: Scale, samples: Samples) -> None:
    samples.add("local read", _sequential(plain, scale))
    samples.add("local 4 KiB read", _scattered(plain, scale.requests))
    samples.add("local write", _sequential(plain, scale, writes=True))
    samples.add("local 4 KiB write", _scattered(plain, scale.requests, writes=True))


def _cold(one: Host, volume: Volume, scale: Scale, samples: Samples) -> None:
    """Nothing is on this host; then the packs are, and the disk is new."""
    one.empty_cache()
    volume.attach()
    small = max(20, scale.requests // COLD_SHARE)
    samples.add("cold 4 KiB read", _scattered(volume.socket, small))
    volume.discard()
    one.empty_cache()
    volume.attach()
    samples.add("cold read", _sequential(volume.socket, scale))
    volume.discard()
    volume.attach()
    samples.add("in the host's cache 4 KiB read", _scattered(volume.socket, small))
    volume.discard()
    volume.attach()
    samples.add("in the host's cache read", _sequential(volume.socket, scale))


def _warm(volume: Volume, scale: Scale, samples: Samples) -> None:
    """All of it was read before; then written over."""
    socket = volume.socket
    _sequential(socket, scale)
    samples.add("read before read", _sequential(socket, scale))
    samples.add("read before 4 KiB read", _scattered(socket, scale.requests))
    first = min(scale.requests, scale.data_bytes // SCATTER_BYTES)
    samples.add("first 4 KiB write", _scattered(socket, first, writes=True))
    samples.add("first write", _sequential(socket, scale, writes=True))
    samples.add("written here write", _sequential(socket, scale, writes=True))
    samples.add("written here 4 KiB write", _scattered(socket, scale.requests, writes=True))
    samples.add("written here read", _sequential(socket, scale))
    samples.add("written here 4 KiB read", _scattered(socket, scale.requests))
    volume.discard()


def _figures(samples: Samples) -> Iterator[Figure]:
    for state, least in _STATES.items():
        for what, unit in (("read", "MiB/s"), ("4 KiB read", "/s")):
            yield Figure(
                bench=BENCH,
                name=f"{what}, {state}, against local",
                value=samples[f"{state} {what}"],
                baseline=samples[f"local {what}"],
                unit=unit,
                least=least,
            )
    for state in ("first", "written here"):
        for what, unit in (("write", "MiB/s"), ("4 KiB write", "/s")):
            yield Figure(
                bench=BENCH,
                name=f"{what}, {'first to its block' if state == 'first' else state}, "
                "against local",
                value=samples[f"{state} {what}"],
                baseline=samples[f"local {what}"],
                unit=unit,
                least=OVERLAY_LEAST if state != "first" else None,
            )
