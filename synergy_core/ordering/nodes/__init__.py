"""The queue where a job's GPUs must lie together: who runs hangs on which GPUs are free."""
