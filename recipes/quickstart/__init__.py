"""A task that a laptop learns in a minute or two: two-digit addition and subtraction."""
