"""What does not grow with what a volume retains, and what a running disk takes."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from uuid import uuid4

from common.units import GiB, KiB, MiB
from hosts.keeper import Keeper
from hosts.volumes.blocks import BLOCK_BYTES
from hosts.volumes.commit import PACK_BYTES
from hosts.volumes.index import (
    LEAF_BLOCKS,
    LEAF_SPAN_BYTES,
    Entry,
    Leaf,
    LeafRef,
    PackUse,
    Root,
)
from hosts.volumes.keys import Keyring
from hosts.volumes.naming import DIGEST_BYTES, ObjectName, content_digest
from hosts.volumes.objects import ObjectStore, StoreConfig
from launch.bench.crash_worker import KeyOfItsNumber
from launch.bench.figures import Figure
from launch.bench.nbd import Nbd
from launch.bench.rig import (
    Host,
    Samples,
    Scale,
    Volume,
    cpu_s,
    data,
    drive,
    host,
    make_image,
    memory_bytes,
    timed,
)
from launch.progress import step

BENCH = "volumes"
FLAT_AIM = 1.1
CHANGE_BYTES = 10 * MiB
CHANGES = 10
"""Places that the change is spread over: files lie here and there."""

STORED_BYTES = 42 * KiB
"""What a block takes in a fabricated pack, as one of the other benches' data does."""

DISKS = 4
MEMORY_AIM_BYTES = 40 * MiB
IDLE_CPU_AIM_PERCENT = 0.5


# -- retained data --------------------------------------------------------------------------


def fabricate(store: ObjectStore, retained_bytes: int, size_bytes: int) -> str:
    """Make a generation that retains so much: a true index, of packs that are not there.

    Nothing but its own blocks can be read of it, and nothing else is asked for.
    """
    volume, keyring = uuid4(), Keyring(KeyOfItsNumber())
    maker = _Fabricated(volume.bytes, Random(retained_bytes))  # noqa: S311 - not a secret
    root = Root(size_bytes, content_digest(volume.bytes))
    bodies: list[bytes] = []
    numbers: list[int] = []
    for number in range(retained_bytes // LEAF_SPAN_BYTES):
        leaf = maker.leaf(root)
        bodies.append(keyring.seal("leaves", volume.bytes, leaf.encode()))
        numbers.append(number)
        if sum(map(len, bodies)) > PACK_BYTES:
            _put_leaves(store, root, volume.bytes, dict(zip(numbers, bodies, strict=True)))
            bodies, numbers = [], []
    if bodies:
        _put_leaves(store, root, volume.bytes, dict(zip(numbers, bodies, strict=True)))
    body = keyring.seal("roots", volume.bytes, root.encode())
    key = ObjectName(volume.bytes, 0, content_digest(body)).key("roots")
    store.put_new(key, body)
    return key


@dataclass
class _Fabricated:
    """Makes leaves whose blocks fill packs one after another."""

    volume: bytes
    random: Random

    def leaf(self, root: Root) -> Leaf:
        entries: dict[int, Entry | None] = {}
        per_pack = PACK_BYTES // STORED_BYTES
        pack = ObjectName(self.volume, 0, b"")
        for slot in range(LEAF_BLOCKS):
            place = slot % per_pack
            if place == 0:
                pack = ObjectName(self.volume, 0, self.random.randbytes(DIGEST_BYTES))
                used = min(per_pack, LEAF_BLOCKS - slot) * STORED_BYTES
                root.packs[pack] = PackUse(used, used)
            digest = self.random.randbytes(DIGEST_BYTES)
            entries[slot] = Entry(pack, place * STORED_BYTES, STORED_BYTES, digest)
        return Leaf.empty().changed(entries)


def _put_leaves(
    store: ObjectStore, root: Root, volume: bytes, leaves: dict[int, bytes]
) -> None:
    body = b"".join(leaves.values())
    name = ObjectName(volume, 0, content_digest(body))
    store.put_new(name.key("leaves"), body)
    root.objects[name] = len(body)
    at = 0
    for number, leaf in leaves.items():
        root.leaves[number] = LeafRef(name, at, len(leaf), content_digest(leaf))
        at += len(leaf)


def retained(store: StoreConfig, folder: Path, scale: Scale) -> Iterator[Figure]:
    """The same change, and a resume on a host that has nothing, with more and more retained."""
    samples = Samples()
    size_bytes = max(scale.retained_gib) * GiB
    volumes: dict[int, Volume] = {}
    with host(folder, store) as one:
        for gib in scale.retained_gib:
            with step(f"make up a volume that retains {gib} GiB"):
                volumes[gib] = one.volume(fabricate(one.objects, gib * GiB, size_bytes))
        for number in range(1, 2 * scale.rounds + 1):
            for gib, volume in volumes.items():
                with step(f"change, pause and resume, round {number}, {gib} GiB"):
                    _change_and_resume(volume, samples, gib, number)
    least, *more = scale.retained_gib
    for gib in more:
        for what, unit in _WHAT.items():
            yield Figure(
                bench=BENCH,
                name=f"{what} with {gib} GiB retained, against {least} GiB",
                value=samples[f"{what} {gib}"],
                baseline=samples[f"{what} {least}"],
                unit=unit,
                aim=FLAT_AIM,
            )
    yield Figure(
        bench=BENCH,
        name=f"index bytes of a 10 MiB change with {max(scale.retained_gib)} GiB retained",
        value=samples[f"index {max(scale.retained_gib)}"],
        baseline=CHANGE_BYTES,
        unit="bytes",
    )


_WHAT = {
    "pause after a 10 MiB change": "s",
    "bytes of that pause": "bytes",
    "cold resume to the change read": "s",
    "bytes of that resume": "bytes",
}


def _change_and_resume(volume: Volume, samples: Samples, gib: int, number: int) -> None:
    volume.attach()
    places = [place * (GiB // CHANGES // BLOCK_BYTES) * BLOCK_BYTES for place in range(CHANGES)]
    piece = CHANGE_BYTES // CHANGES
    with Nbd(volume.socket) as nbd:
        for place in places:
            nbd.write(place, data(piece, seed=number * 100 + place // MiB))
        nbd.flush()
    one, disks, volume_id = volume.host, volume.host.disks, volume.volume_id
    pause, size, resume, fetched = _WHAT
    samples.add(f"{pause} {gib}", timed(lambda: disks.commit(volume_id, volume.publish)))
    samples.add(f"{size} {gib}", volume.commits[-1].uploaded_bytes)
    samples.add(f"index {gib}", volume.commits[-1].index_bytes)
    disks.detach(volume_id, discard=False)
    one.empty_cache()

    def wake() -> None:
        volume.attach()
        with Nbd(volume.socket) as nbd:
            for place in places:
                nbd.read(place, piece)

    samples.add(f"{resume} {gib}", timed(wake))
    samples.add(f"{fetched} {gib}", disks.fetched(volume_id).bytes)
    disks.detach(volume_id, discard=True)


# -- memory and CPU -------------------------------------------------------------------------


def footprint(store: StoreConfig, folder: Path, scale: Scale) -> Iterator[Figure]:
    """Memory and CPU of all that serves a running disk."""
    image = make_image(folder / "image", scale.data_bytes)
    with host(folder, store) as one:
        head = one.import_image(image, scale.data_bytes)
        volumes = [one.volume(head) for _ in range(DISKS)]
        for volume in volumes:
            volume.attach()
        fresh = sum(memory_bytes(pid) for v in volumes for pid in v.pids().values())
        with step(f"read {scale.data_bytes // MiB} MiB through each of {DISKS} disks"):
            for volume in volumes:
                drive(volume.socket, size_bytes=MiB, count=scale.data_bytes // MiB)
        used = sum(memory_bytes(pid) for v in volumes for pid in v.pids().values())
        with step(f"look at {DISKS} idle disks for {scale.seconds:g} s"):
            idle_percent = _idle_percent(one, volumes, scale)
    for what, value in (("after attach", fresh), ("after much was read", used)):
        yield Figure(
            bench=BENCH,
            name=f"memory of what serves a disk, {what}, against the aim",
            value=value / DISKS,
            baseline=MEMORY_AIM_BYTES,
            unit="bytes",
            aim=1.0,
        )
    yield Figure(
        bench=BENCH,
        name="CPU of an idle disk, keeper included, against the aim",
        value=idle_percent,
        baseline=IDLE_CPU_AIM_PERCENT,
        unit="% of a core",
        aim=1.0,
    )


def _idle_percent(one: Host, volumes: list[Volume], scale: Scale) -> float:
    """Return what an idle disk takes of a core: its daemons, and its part of the keeper."""
    pids = [os.getpid(), *(pid for volume in volumes for pid in volume.pids().values())]
    keeper = Keeper(one.disks, due=lambda _: None)
    keeper.start()
    before, started = sum(map(cpu_s, pids)), time.monotonic()
    time.sleep(scale.seconds)
    took_s = sum(map(cpu_s, pids)) - before
    keeper.stop()
    return 100 * took_s / (time.monotonic() - started) / DISKS
