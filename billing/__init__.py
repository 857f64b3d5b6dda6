"""What teams owe: meters, prices and cost. Knows teams, not sandboxes."""
