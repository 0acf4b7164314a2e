"""Package: bundles in the form that an app's build system takes, with code that opens and tests them in the app."""
