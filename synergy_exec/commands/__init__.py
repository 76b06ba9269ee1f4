"""What a person types: a file per command."""
