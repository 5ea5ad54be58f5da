"""The control loop: what is desired, compared with what is there, and made so."""
