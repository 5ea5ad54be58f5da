"""One machine: the processes of one endpoint, from a resource to a router that answers."""
