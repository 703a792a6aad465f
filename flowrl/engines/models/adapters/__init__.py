"""LoRA adapters: trained, saved, and on a quantized base model.

Entry points: `lora.add_adapter`, `lora.model_weights`, `saved_adapter.SavedAdapter`, `quantized_base.QuantizedLinear`.
May import `flowrl.config`, `flowrl.data` and `flowrl.engines.models`.
"""
