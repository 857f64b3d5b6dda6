import json
import socket
import subprocess
import sys
import threading
from datetime import UTC, datetime

import pytest

from launch.bench.__main__ import main
from launch.bench.figures import Figure, spread, table
from launch.bench.plain import await_banner
from launch.progress import LaunchFailed

AT = datetime(2026, 11, 29, 19, 30, 5, 123456, tzinfo=UTC)


def figure(**changes: object) -> Figure:
    fields: dict[str, object] = {
        "bench": "exec", "name": "round trip", "value": 30.0, "unit": "ms",
    }  # fmt: skip
    return Figure(**(fields | changes))  # type: ignore[arg-type]


def test_a_ratio_is_the_value_in_baselines() -> None:
    assert figure(value=30.0, baseline=20.0).ratio == 1.5


@pytest.mark.parametrize("baseline", [None, 0.0])
def test_there_is_no_ratio_without_something_to_compare_with(baseline: float | None) -> None:
    compared = figure(baseline=baseline, aim=1.5)

    assert compared.ratio is None
    assert compared.is_reached is None


@pytest.mark.parametrize(("value", "is_reached"), [(29.0, True), (30.0, True), (30.1, False)])
def test_an_aim_is_reached_up_to_its_very_ratio(value: float, is_reached: bool) -> None:
    assert figure(value=value, baseline=20.0, aim=1.5).is_reached is is_reached


@pytest.mark.parametrize(("value", "is_reached"), [(15.9, False), (16.0, True), (99.0, True)])
def test_where_more_is_better_an_aim_is_reached_from_its_very_ratio(
    value: float, is_reached: bool
) -> None:
    compared = figure(value=value, baseline=20.0, least=0.8)

    assert compared.is_reached is is_reached
    assert "≥ 0.8" in table([compared])


def test_a_figure_without_an_aim_is_neither_reached_nor_missed() -> None:
    assert figure(baseline=20.0).is_reached is None


def test_a_figure_is_one_json_line_with_every_field() -> None:
    line = figure(value=1 / 3, baseline=2 / 3).json_line(command="bin/bench exec", at=AT)

    assert "\n" not in line
    assert json.loads(line) == {
        "bench": "exec",
        "figure": "round trip",
        "value": 0.3333,
        "unit": "ms",
        "baseline": 0.6667,
        "ratio": 0.5,
        "command": "bin/bench exec",
        "at": "2026-11-29T19:30:05+00:00",
    }


def test_a_figure_alone_has_null_for_what_it_lacks() -> None:
    read = json.loads(figure().json_line(command="bin/bench exec", at=AT))

    assert read["baseline"] is None
    assert read["ratio"] is None


def test_a_table_has_a_line_for_each_figure_under_aligned_headings() -> None:
    shown = table(
        [
            figure(name="fetched", value=4194304, unit="bytes", baseline=8388608),
            figure(name="slow", value=31.5, baseline=20.0, aim=1.5),
            figure(name="quick", value=21.0, baseline=20.0, aim=1.5),
        ]
    ).splitlines()

    assert shown[0].split() == ["figure", "value", "baseline", "ratio", "aim"]
    assert shown[2].split() == [
        "fetched",
        "4,194,304",
        "bytes",
        "8,388,608",
        "bytes",
        "0.5",
        "-",
    ]
    assert shown[3].endswith("1.575  ≤ 1.5 ✗")
    assert shown[4].endswith(" 1.05  ≤ 1.5 ✓")
    assert {len(line) for line in shown} == {len(shown[1])} | {len(shown[2])}
    assert shown[2].index("4,194,304") + len("4,194,304 bytes") == shown[3].index("ms") + 2


def test_a_spread_tells_the_median_and_its_bounds() -> None:
    assert spread([3.0, 1.0, 2.0, 10.0]) == "2.500 s (1.000-10.000, 4 times)"


def test_a_machine_is_up_when_its_sshd_says_its_name() -> None:
    """QEMU takes a connection at once and drops it while nobody listens in the guest."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as machine,
    ):
        taken = []

        def answer() -> None:
            for said in (b"", b"SSH-2.0-OpenSSH_9.2\r\n"):
                connection, _ = server.accept()
                with connection:
                    connection.sendall(said)
                taken.append(said)

        guest = threading.Thread(target=answer)
        guest.start()
        await_banner(machine, server.getsockname()[1], until=float("inf"))
        guest.join()
        machine.kill()

    assert len(taken) == 2


def test_a_machine_that_ended_is_not_waited_for() -> None:
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as machine:
        machine.wait()

        with pytest.raises(LaunchFailed, match="ended with 3"):
            await_banner(machine, 1, until=float("inf"))


def test_an_unknown_bench_is_refused_with_what_there_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["speed"])

    assert "lifecycle" in capsys.readouterr().err


def test_a_bench_needs_root(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)

    assert main(["exec", "--key", "s0_local_x"]) == 1
    assert "as root" in capsys.readouterr().out
