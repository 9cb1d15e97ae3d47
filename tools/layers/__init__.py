"""The rules about which file may know which, and about the names of files (tools/check_layers.py)."""
