"""Scheduler, device and text, one step at a time: requests become tokens here."""
