"""The facade: one object that holds a model, its tokenizer and what was loaded, and writes text."""
