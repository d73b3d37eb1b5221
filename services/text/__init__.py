"""Messages → prompt ids, generated ids → text. One implementation for every engine; lives in the edge, never loads torch."""
