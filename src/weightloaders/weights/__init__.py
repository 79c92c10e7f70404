"""What a source holds: catalogues of tensors, byte sources, and the formats that describe them."""
