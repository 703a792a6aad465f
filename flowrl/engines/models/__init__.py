"""Models and their weights in one process. The process holds the full model or a shard.

Entry points: `loading.load_policy`, `load_critic` and `load_reward_model`; `weights.export_weights`;
`adapters.lora.add_adapter`; `int8.quantized_copy`. May import `flowrl.config`, `flowrl.data` and
`flowrl.devices`.
"""
