"""A recipe on many hosts: Ray is started on each of them, and ended with the recipe."""
