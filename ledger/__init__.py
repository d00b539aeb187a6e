"""The books: state derived from the log, which can always be rebuilt from it."""
