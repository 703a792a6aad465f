"""Models and their weights, on one process or one shard.

Entry points: `loading.load_policy`, `load_critic` and `load_reward_model`; `weights.export_weights`;
`lora.add_adapter`; `int8.quantized_copy`. May import: `flowrl.data`, `flowrl.config`.
"""
