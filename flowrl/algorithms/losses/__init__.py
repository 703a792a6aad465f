"""Policy and value losses per token, and their aggregation to one number.

Entry points are exported by `flowrl.algorithms`. May import `flowrl.algorithms`.
"""
