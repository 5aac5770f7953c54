"""The kinds of media that this worker reads: `kind` is their contract,
`registry` lists them, each has a file of its own."""
