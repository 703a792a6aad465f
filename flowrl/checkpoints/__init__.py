"""Checkpoints of a run, and the run folder that contains them.

Entry points: `Checkpoints` (checkpoints on disk), `Saver` (saves and restores groups and driver objects),
`find_checkpoint` (the checkpoint from which a run resumes), `input_checksums` (files that a run reads), `RunFolder` and
`folder_lock`.
May import `flowrl.config`, `flowrl.controller`, `flowrl.data` and `flowrl.engines`.
"""
