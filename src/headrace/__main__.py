"""`python -m headrace`: the command line, where no script is installed."""

from headrace.cli.app import main

main()
