"""What an edge keeps in the relational database: SQLite by default, PostgreSQL in production."""
