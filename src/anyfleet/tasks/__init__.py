"""Data, partitions, networks: what a federation learns."""
