"""The NBD client of tests: that of the benches."""

from launch.bench.nbd import Nbd, NbdError

__all__ = ["Nbd", "NbdError"]
