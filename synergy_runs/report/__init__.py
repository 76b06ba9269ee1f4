"""What a person looks at: figures, `report.html`, and traces for Perfetto, all made from run folders."""
