"""The wire: messages, their types and ranges, and their bytes. PROTOCOL.md describes it."""
