"""Fuzzing: hostile and broken files by the million, each of which must be read rightly or refused by our own errors.

`python -m fuzz` runs it, and `make fuzz`; docs/explanation/fuzzing.md says what is checked, how, and what was found.
"""
