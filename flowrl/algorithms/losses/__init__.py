"""Policy and value losses per token, and their aggregation to one number.

Entry points are exported by `flowrl.algorithms`. Modules import only `flowrl.algorithms`.
"""
