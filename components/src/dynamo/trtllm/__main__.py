"""`python -m dynamo.trtllm` starts a worker."""

from dynamo.trtllm.main import main

if __name__ == "__main__":
    main()
