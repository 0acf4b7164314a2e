"""Programs that run in a child process and import nothing of edgekit."""
