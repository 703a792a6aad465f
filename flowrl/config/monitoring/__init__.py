"""Settings of the checks of a run: thresholds of the health checks. May import `flowrl.config.base`."""
