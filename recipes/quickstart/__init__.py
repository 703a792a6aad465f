"""The quickstart task: two-digit addition and subtraction, learned on a laptop in a few minutes."""
