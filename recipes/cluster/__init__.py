"""Runs a recipe on several hosts: starts a Ray node on each host, and stops the nodes when the recipe ends."""
