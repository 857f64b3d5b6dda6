"""Every part of `bin/bench volumes` works, on as little as there can be."""

import pytest

from common.units import MiB
from hosts.volumes.objects import StoreConfig
from launch.bench.figures import table
from launch.bench.rig import Scale
from launch.bench.volumes import PARTS, volumes

TINY = Scale(data_bytes=4 * MiB, rounds=1, seconds=0.8, requests=20, retained_gib=(1, 2))


@pytest.mark.parametrize("part", PARTS)
def test_a_part_gives_figures_above_nothing(s3: StoreConfig, part: str) -> None:
    figures = list(volumes(s3, [part], TINY))

    assert figures
    assert len({figure.name for figure in figures}) == len(figures)
    for figure in figures:
        assert figure.value > 0 or "idle" in figure.name or "gets" in figure.name, figure
        assert figure.baseline is None or figure.baseline > 0, figure
    assert table(figures)
