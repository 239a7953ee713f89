"""The client library and the wire: everything a process needs to use a kvpool daemon."""
