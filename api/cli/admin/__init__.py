"""Commands that ask the admin API: of a service by its URL, or in this process on a store."""
