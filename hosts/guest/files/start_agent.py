"""Start the agent of this folder, whatever Python path the guest has set."""

import sys

sys.path.insert(0, "/run/sandkeep/toolkit/lib/sandkeep")

from hosts.guest import agent

agent.main()
