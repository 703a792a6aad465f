"""Settings of monitoring: thresholds of the health checks, and trackers. May import `flowrl.config.base`."""
