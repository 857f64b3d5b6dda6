"""A store that goes wrong, for tests: the real one, behind the benches' proxy.

def test_…(s3: StoreConfig) -> None:
    with faulty(s3, Faults(seed=3, share=0.2)) as store: …
"""

from launch.bench.s3_proxy import FAULTS, Faults, faulty

__all__ = ["FAULTS", "Faults", "faulty"]
