"""What prefill and decode workers share: runs, replies, control, heartbeat, credit, drain."""
