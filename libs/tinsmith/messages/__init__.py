"""Every message that crosses the bus, one module per subject matter, and the table of routes."""
