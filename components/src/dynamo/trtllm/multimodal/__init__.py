"""The media pipeline: parts -> fetched bytes -> decoded images or embedding files.
I/O is in `fetch` alone."""
