"""Reports as text and HTML: facts and verdicts are rendered here, never made."""
