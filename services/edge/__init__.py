"""The edge: may this request enter, and then tokens into text, text into a stream. `jobs` knows the bus, `api` knows HTTP."""
