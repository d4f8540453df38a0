"""What balance is worth in time: experts by rows, dispatch and combine, migration, memory."""
