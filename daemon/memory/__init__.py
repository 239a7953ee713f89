"""The KV memory: blocks, the tables that hold them, the prefix cache, and the host pool."""
