"""Who may ask, and how much: keys, tenants, limits. Knows no HTTP and no prompt."""
