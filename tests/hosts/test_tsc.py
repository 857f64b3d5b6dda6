from pathlib import Path

from hosts.tsc import tsc_khz


def test_the_rate_is_what_the_kernel_measured(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\ncpu MHz\t\t: 2445.406\nflags\t\t: tsc\n")

    assert tsc_khz(proc=tmp_path, sys=tmp_path) == 2445406


def test_a_rate_that_changes_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("cpu MHz\t\t: 800.000\n")
    (tmp_path / "devices/system/cpu/cpu0/cpufreq").mkdir(parents=True)

    assert tsc_khz(proc=tmp_path, sys=tmp_path) is None


def test_a_machine_that_says_nothing_has_no_rate(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\n")

    assert tsc_khz(proc=tmp_path, sys=tmp_path) is None
