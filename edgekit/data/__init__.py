"""Samples, images and labels: read, drawn, judged before they are used."""
