"""Help for the tests of loader authors: an isolated registry, and distributions that exist only for a test."""

from weightloaders.testing.distributions import fake_distribution as fake_distribution
from weightloaders.testing.isolation import isolated_registry as isolated_registry
