"""Prepares datasets: filters and tokenizes rows, and stores them in a folder that a run memory-maps.

Entry points: `prepare.prepare` (creates a folder), `prepared_folder.PreparedFolder` (reads it),
`tokenized_rows.tokenize_row` (tokens and mask of one row), `check_rows.render_rows` (text of rows with their mask).

May import `flowrl.config` and `flowrl.data`.
"""
