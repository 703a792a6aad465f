"""Generation with vLLM. vLLM is optional, and only these modules import it."""
