"""Other workers of the deployment: what is asked of an encode or a prefill worker,
and the messages between them."""
