"""A job's life at the edge, without HTTP: submit, adopt, supervise, resume, cancel."""
