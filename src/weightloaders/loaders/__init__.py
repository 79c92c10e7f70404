"""The loaders, one file each. A loader only says what a source holds; the plan decides and the engine moves."""
