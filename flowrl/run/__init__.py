"""What surrounds a loop: the run folder, metrics, progress, figures and the timeline."""
