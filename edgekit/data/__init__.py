"""Samples, images and labels: read, drawn at random, and checked before they are used."""
