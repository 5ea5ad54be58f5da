"""Measures an endpoint from outside: timed requests, engines' own counters, proofs of what happened."""
