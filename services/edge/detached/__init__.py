"""Detached jobs at the edge: they have a row in the database, outlive their client and their edge, and are read from any edge."""
