"""Which jobs run where: jobs and the cluster as policies see them, policies, placement, allocator, decisions."""
