"""How fast this machine's time stamp counter ticks, for guests that are emulated."""

import re
from pathlib import Path


def tsc_khz(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> int | None:
    """Return the counter's rate as the kernel found it; None where it does not say.

    /proc/cpuinfo has it where nothing changes the CPU's frequency, as in a virtual machine;
    elsewhere the number there is that of the moment.
    """
    if (sys / "devices/system/cpu/cpu0/cpufreq").exists():
        return None
    found = re.search(r"^cpu MHz\s*: (\d+\.\d+)$", (proc / "cpuinfo").read_text(), re.MULTILINE)
    return round(float(found[1]) * 1000) if found else None
