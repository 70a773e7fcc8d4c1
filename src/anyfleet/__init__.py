"""Federated learning on unequal devices: cut any model to size, run any method through one loop."""

__all__ = ["__version__"]

__version__ = "0.1.0"
