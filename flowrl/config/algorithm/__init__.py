"""Settings of the algorithm: estimators, policy losses, corrections, reward shaping and preference losses.

Entry points are the unions that `flowrl.config` exports, such as `AnyAdvantage` and `AnyPolicyLoss`. Their classes are
generated from the functions of flowrl.algorithms, whose source `declarations` reads. May import `flowrl.config.base`
and `flowrl.config.data`.
"""
