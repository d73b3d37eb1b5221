"""OpenAI's Responses API: answers with state. Builds on `api` (how a request becomes an answer), `detached` and `store`."""
