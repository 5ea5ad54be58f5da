"""vLLM plugin."""
