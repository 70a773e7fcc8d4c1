"""Real devices, reached through Flower."""
