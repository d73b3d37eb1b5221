"""A simulated cluster in which placement policies are compared: workers, traces, rival rules, measures."""
