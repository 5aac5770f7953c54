"""The portable engine: PyTorch and Hugging Face Transformers on a CPU or one GPU, behind the engine port.

`engine` is the adapter and runs on the event loop; `worker` is the one thread that owns the model;
`scheduler` decides what each step does; `runner`, `cache`, `attention`, `sampling` and `encoder` do it;
`families` and `loading` say which models are served. Nothing outside this package imports transformers.
"""
