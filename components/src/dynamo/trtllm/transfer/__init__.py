"""Tensors from one process to another: the port, its in-process and NIXL adapters, and the memory both use.

Only this package imports `nixl`, and only when a transfer over it starts (`nixl_agent`).
It knows nothing about requests, engines or Dynamo.
"""
