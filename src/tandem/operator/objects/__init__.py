"""The Kubernetes objects of an endpoint, one module for each kind; all pure functions of the plan."""
