"""Where V2 has its buffers."""
