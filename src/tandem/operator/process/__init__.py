"""The operator as a process: one leader, health, metrics, webhooks, the control loop."""
