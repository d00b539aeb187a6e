"""The command line, one group of commands per file. Importing one opens no door: `--help` stays quick."""
