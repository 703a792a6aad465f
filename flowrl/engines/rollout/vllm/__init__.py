"""Generation with vLLM. These modules are the only ones that import vLLM, which is an optional dependency."""
