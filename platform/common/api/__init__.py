"""What every endpoint shares: the envelope, errors and view bases."""
