"""Frameworks themselves, unchanged, over nccl_ep. `make frameworks` installs them; tests skip those that are absent."""
