"""One program, many processes: what a call is, where it goes, and what comes back."""
