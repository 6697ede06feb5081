"""What an operator sees: metrics, the port that exposes them, and log lines.

The only room that knows prometheus_client. It is told what happened and decides nothing.
"""
