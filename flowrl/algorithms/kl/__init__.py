"""KL divergence to the reference policy: estimators, and controllers of its coefficient.

Entry points are exported by `flowrl.algorithms`. May import `flowrl.algorithms`.
"""
