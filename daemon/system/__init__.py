"""What the daemon has to do with the machine: devices, memory, users, descriptors, the service manager."""
