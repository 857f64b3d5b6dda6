"""`bin/bench`: measures a running platform against what it is built on."""
