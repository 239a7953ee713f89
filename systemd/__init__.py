"""Unit files that `kvpool service install` puts in place. Data only: nothing imports this package for code."""
