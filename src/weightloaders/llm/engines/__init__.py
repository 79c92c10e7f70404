"""Engines: what turns prompts into text. `LLM` picks one by name."""
