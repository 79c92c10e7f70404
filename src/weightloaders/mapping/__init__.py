"""How names and layouts change between a source and a model: rules, symbols, and what models declare."""
