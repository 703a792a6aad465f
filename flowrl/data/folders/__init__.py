"""Folders that are written completely or not at all (atomic_folder.py), and private folders for temporary files.

Entry points: `write_atomically`, and `private_folder` and `create_folder` (private_folder.py), which also remove the
folders of killed processes. `process_stat` identifies these processes. May import `flowrl.config`.
"""
