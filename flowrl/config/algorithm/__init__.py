"""Settings of the algorithm: estimators, policy losses, corrections, reward shaping and preference losses."""
