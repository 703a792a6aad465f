"""What flows: batches, their field table, prompts and tokens."""
