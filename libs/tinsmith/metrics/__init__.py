"""Metrics: one list of them (``names``), and how each process tells its own over HTTP."""
