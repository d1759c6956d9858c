"""How inputs travel to a device and outputs back."""
