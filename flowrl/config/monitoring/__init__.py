"""Settings of what observes a run: thresholds of the health checks, and trackers. May import `flowrl.config.base`."""
