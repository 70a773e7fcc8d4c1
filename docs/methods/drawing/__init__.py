"""The pictures of the method pages, computed with the project's own formulas."""
