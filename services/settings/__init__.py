"""Settings of every process: one file a section; `load` reads them."""
