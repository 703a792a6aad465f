"""Measurements on one GPU, for tests/run_gpu.sh. docs/benchmarks.md has their results.

`__main__.py` runs the cells of one part. A cell is a function that returns one line of figures, or raises. `cells.py`
runs cells, `models.py` builds models of the sizes of Qwen2.5, and `flops.py` counts their operations.
"""
