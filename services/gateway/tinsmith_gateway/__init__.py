"""The gateway: the Tinker protocol over HTTP on one side, the bus on the other."""
