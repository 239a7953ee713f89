"""The loop, and everybody who talks to it: clients, administrators, scrapers."""
