"""`python -m producers.cli`: the command line where no console script is installed."""

from producers.cli.main import main

main(prog_name="switchyard")
