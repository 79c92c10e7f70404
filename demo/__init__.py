"""A real model through each built-in loader (`make demo`), and the models that the tests use."""
