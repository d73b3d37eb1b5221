"""The model store: fetch, verify, convert, open. Weights and tokenizers as files; knows no engine and never loads torch."""
