"""What crosses a process boundary: subjects, messages, errors, identities. Imports nothing of ours."""
