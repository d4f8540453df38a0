"""Load: samples on their way to a store, the windows that they become, and what is kept of them."""
