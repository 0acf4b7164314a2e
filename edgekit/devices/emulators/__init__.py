"""Devices that run a provider's or a vendor's real code on a plain PC."""
