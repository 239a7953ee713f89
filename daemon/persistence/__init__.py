"""What outlives a daemon: the journal of accepted requests, and snapshots of sequences."""
