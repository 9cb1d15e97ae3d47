"""DeepEP V1: ``Buffer``, with the normal and the low-latency mode."""
