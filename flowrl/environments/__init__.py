"""Environments: the policy responds, the environment observes, for one or several turns.

base.py has the protocol of an environment. `EnvironmentHost` (environment_host.py) runs environments in separate
processes (server.py). tool_environment.py, reward_environment.py and the adapters are environments.

May import only `flowrl.config` and `flowrl.rewards`, and loads no torch.
"""
