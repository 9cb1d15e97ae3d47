"""Measures the library, and what a user would do without it: ``python -m bench ll``."""
