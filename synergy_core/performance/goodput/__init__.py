"""How fast a job trains and how much each sample is worth: throughput, statistical efficiency, batch choice, fits."""
