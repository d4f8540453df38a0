"""How threads wait, are cancelled, and are watched."""
