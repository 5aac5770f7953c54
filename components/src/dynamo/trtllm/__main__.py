"""`python -m dynamo.trtllm` starts a worker."""

if __name__ == "__main__":
    from dynamo.trtllm.service.signals import end_at_once_on_signals

    end_at_once_on_signals()

    from dynamo.trtllm.main import main

    main()
