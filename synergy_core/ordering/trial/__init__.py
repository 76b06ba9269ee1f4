"""The queue that walks over all active jobs and tries their GPUs out: several GPU types, borrowed quotas."""
