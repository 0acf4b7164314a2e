"""The jobs that a user starts: each calls the stages below it in their order."""
