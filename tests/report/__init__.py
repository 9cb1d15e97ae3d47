"""nccl_ep.record, nccl_ep.report and nccl_ep.metrics."""
