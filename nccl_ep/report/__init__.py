"""``python -m nccl_ep.report FILE...``: one HTML page of what was recorded, measured or found. docs/report.md."""
