"""KL divergence to the reference policy: estimators, the exact value, and controllers of its coefficient.

Entry points are exported by `flowrl.algorithms`. Modules import only `flowrl.algorithms`.
"""
