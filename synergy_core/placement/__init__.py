"""From GPU counts to concrete GPUs: for one job (`one_job`), for a whole round (`whole_round`)."""
