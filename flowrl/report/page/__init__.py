"""The HTML report of runs: one file that opens without a server or network.

Entry point: `write_report` (write_report). The modules `*_data` collect the parts of the report from run folders, as
plain values of JSON. `write_report` combines these values with the scripts and styles of `assets/` to one HTML
document.
May import `flowrl.checkpoints`, `flowrl.config`, `flowrl.data`, `flowrl.health` and `flowrl.report`.
"""
