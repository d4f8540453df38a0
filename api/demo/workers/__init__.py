"""The processes of the demo: ranks, controller, host cache, checker."""
