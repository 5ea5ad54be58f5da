"""The data plane: takes OpenAI requests, decides the path of each, runs its legs, relays the answer."""
