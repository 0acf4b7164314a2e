"""Renders reports as text, HTML, Markdown and JUnit; facts and verdicts are computed elsewhere."""
