"""Adapters for frameworks, each in a module of its framework's name. None is imported before it is asked for."""
