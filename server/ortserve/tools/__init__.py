"""The tools: commands that show what a model, a server and a machine do. The server never imports them.

Each command is a package with a module ``command``, whose ``main`` gets the arguments; ``cli.main`` imports it by its
name when the command runs. Besides the packages of the server, the tools need those of the extra ``tools``.
"""
