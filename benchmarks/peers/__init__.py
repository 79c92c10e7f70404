"""How fast, and with how much memory, checkpoints come into models: side by side with other ways, in one run.

``python -m benchmarks.peers`` makes the checkpoints, measures, and prints the tables; ``benchmarks/README.md`` has the
method.
"""
