"""`/api/v1`: sandboxes, their contexts and files, templates and quotas."""
