"""Reports as text and HTML: facts and verdicts are computed elsewhere and only rendered here."""
