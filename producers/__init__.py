"""The way in: clients, command line, release."""
