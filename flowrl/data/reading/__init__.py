"""Reads rows of any supported format and shape as conversations, and counts the rows that it drops.

Entry points: `reader.read_conversations` (all rows of several files), `raw_rows.read_chunks` (unparsed rows),
`shapes.parse_row` (one row), `kinds.select_turns` (selects the turns that a kind of training needs). May import
`flowrl.config` and `flowrl.data`.
"""
