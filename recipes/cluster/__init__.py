"""Runs a recipe on several hosts: starts a Ray node on each, and ends the nodes with the recipe."""
