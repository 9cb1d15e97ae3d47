"""The time line of a recorded program as JSON for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

from .inputs import Json


def trace(figures: Json) -> Json:
    """A process a rank, with a thread of its host's calls and one of its GPU. Times in us."""
    events: list[Json] = []
    for rank in figures["ranks"]:
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        for thread, name in enumerate(("host", "GPU")):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}})
    for span in figures["spans"]:
        about = {name: span[name] for name in ("number", "tokens", "bytes") if name in span}
        event = {"ph": "X", "name": span["name"], "cat": f"{span['mode']} {span['kind']}", "pid": span["rank"],
                 "args": about}  # fmt: skip
        events.append(event | {"tid": 0, "ts": span["begin_us"], "dur": span["us"]})
        if "device_us" in span:
            events.append(event | {"tid": 1, "ts": span["device_begin_us"], "dur": span["device_us"]})
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"nccl_ep": figures["version"]}}
