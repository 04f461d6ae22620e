"""Generation on vLLM: arguments, the engine, and how it receives weights."""
