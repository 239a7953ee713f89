"""The daemon: block pool, scheduler, engine and server."""
