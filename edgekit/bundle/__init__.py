"""Bundles: everything that an app needs to run a model on one target, with digests, a signature and test results."""
