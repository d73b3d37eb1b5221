"""`headrace up`: NATS and every service as child processes of one supervisor, on this machine."""
