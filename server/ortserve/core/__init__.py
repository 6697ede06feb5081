"""The vocabulary of the server: what a tensor, a request, a model signature and a batch are.

Standard library and numpy only; every other room may import it and it imports none of them.
"""
