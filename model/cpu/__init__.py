"""The CPU back end: a Program as rows of a table that a team of threads runs."""
