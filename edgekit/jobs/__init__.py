"""What a user starts: each job calls the stages below it in their order."""
