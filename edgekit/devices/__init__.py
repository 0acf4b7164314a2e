"""Everything that can run a model: this machine, simulators, emulators, and devices behind adb or ssh."""
