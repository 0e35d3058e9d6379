"""The command line: options to processes, and the processes of one host looked after."""
