"""Tandem: disaggregated prefill and decode for LLM inference."""
