"""What a run starts from: settings and command lines, the requested policies, the workload and the cluster."""
