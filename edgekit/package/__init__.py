"""Packages for an app's build system (AAR, Swift package, npm, ...): bundles, and code that opens and tests them."""
