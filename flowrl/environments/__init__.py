"""Environments: in each turn of an episode, the policy responds and the environment returns an observation.

base.py has the protocol of an environment. `EnvironmentHost` (environment_host.py) runs environments in separate
processes (server.py). tool_environment.py, reward_environment.py and the adapters are environments.

Loads no torch. May import only `flowrl.config`, `flowrl.rewards` and `flowrl.user_code`.
"""
