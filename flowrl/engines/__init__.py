"""The machines: the only code that touches a model. Import the module you need; each loads only what it uses.

microbatch   rows of similar length, padded, within a token budget
models       policy, critic and reward model from and to `save_pretrained` folders
train        forward passes over a table, and optimizer steps whose gradient does not depend on how rows were split
sampling     random numbers keyed by what they decide, and the choice of a token
kv_cache     keys and values of past tokens, each row from position 0
hf_decode    rows that decode together, and come and go
hf_rollout   generation with transformers, all at once or as requests come
weights      a model's weights as NumPy arrays, and back
"""
