"""Places jobs on concrete GPUs: one job (`one_job`), or all jobs of a round (`whole_round`)."""
