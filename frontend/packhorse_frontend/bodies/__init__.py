"""Bodies of requests: read with bounds, parsed, and their inputs checked."""
