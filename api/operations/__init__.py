"""The operations of the admin API: routes and commands are made of their declarations."""
