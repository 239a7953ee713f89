"""Every setting, and the one way in which file, environment and flags become a Config."""
