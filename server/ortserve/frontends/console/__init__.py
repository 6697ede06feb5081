"""The console page: HTML, style and scripts that browsers run as they are, without a build or a library.

``http/console_routes`` serves the files. ``README.md`` lists them.
"""
