"""Plans of the plug-in: rank 0 asks a process, and every rank checks what comes back."""
