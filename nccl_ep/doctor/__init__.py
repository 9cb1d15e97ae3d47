"""``python -m nccl_ep.doctor``: what this machine offers, what is missing, and a short self-test."""
