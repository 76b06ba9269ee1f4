"""The nodes' agents as the controller and the profiler see them: who is there, what runs on them, what they say."""
