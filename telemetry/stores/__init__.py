"""The stores behind ``LoadStore``: memory, SQLite, Redis."""
