"""What every HTTP API of ours shares: envelope, errors, views, and the way to the database."""
