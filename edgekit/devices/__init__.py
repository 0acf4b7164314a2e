"""Whatever runs a model for us: this machine, a simulator, an emulator, a device."""
