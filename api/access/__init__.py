"""Who may do what over HTTP, and the record of what was done: access keys and the audit."""
