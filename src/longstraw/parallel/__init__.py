"""Many devices: axes of a DeviceMesh, by name."""
