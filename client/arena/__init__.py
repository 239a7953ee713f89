"""Shared memory between one client and the daemon: the arena of a session, and the pool map."""
