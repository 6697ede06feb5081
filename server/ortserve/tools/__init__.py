"""The tools: commands that show what a model, a server and a machine do. The server never imports them.

Each command is a package with the modules ``arguments``, whose ``read`` parses the command line, and ``command``, whose
``run`` gets the parsed arguments and returns an ``Outcome``. ``cli.main`` imports them by their names when the command
runs. Besides the packages of the server, the tools need those of the extra ``tools``.
"""
