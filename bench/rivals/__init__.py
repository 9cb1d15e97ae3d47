"""Systems beside one another, with the same tokens: a module for each. ``python -m bench rivals`` runs them."""

NAMES = ("nccl_ep", "flashinfer", "nccl_ep_nvidia", "deepep_v1", "torch_all_to_all")
